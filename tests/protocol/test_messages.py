"""Messages survive the wire unchanged, and what is not a message is refused."""

import msgspec
import pytest

from twostroke.protocol.errors import (
    AbortedError,
    DeadlineError,
    ErrorInfo,
    ErrorKind,
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    TransferError,
    from_info,
)
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import (
    Abort,
    Attach,
    Detach,
    Drain,
    FrontendBeat,
    GenerationRequest,
    Phase,
    RequestEnvelope,
    Shutdown,
    WorkerBound,
)
from twostroke.protocol.responses import (
    FinishReason,
    FrontendBound,
    ResponseBatch,
    SequenceOutput,
    TokenLogprobs,
)
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import ContextPhaseParams, LayoutFingerprint, ProcessName, TransferHandle
from twostroke.protocol.worker import (
    Attached,
    AttachRefused,
    BlockCounts,
    Heartbeat,
    Role,
    WorkerDescription,
    WorkerLoad,
    WorkerStopping,
)

KEY = SequenceKey(client_id=(7 << 48) | 5, index=2, attempt=1)
LAYOUT = LayoutFingerprint(model="ab" * 32, dtype="float32", block_size=16, layers=2, kv_heads=3, head_dim=64)
HANDLE = TransferHandle(
    version=1,
    epoch=9,
    key=KEY,
    address="tcp://h:1",
    layout=LAYOUT,
    blocks=3,
    expires_in_s=60.0,
    process=ProcessName("host", 7),
    mac=b"m" * 32,
)
PARAMS = ContextPhaseParams(version=1, handle=HANDLE, prompt_tokens=40, first_token_ids=pack_tokens([11]))
DESCRIPTION = WorkerDescription(
    role=Role.CONTEXT,
    model="m",
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=(1, 2),
    num_blocks=8,
    max_sequences=4,
    layout=LAYOUT,
)


def make_request(**changes: object) -> GenerationRequest:
    """A request with every optional field at its default, but for `changes`."""
    fields: dict[str, object] = {"key": KEY, "prompt_ids": pack_tokens([1, 2, 3]), "sampling": SamplingParams()}
    return GenerationRequest(**(fields | changes))  # type: ignore[arg-type]  # the tests say the types


@pytest.mark.parametrize(
    "body",
    [
        make_request(),
        make_request(
            generated_ids=pack_tokens([11]),
            sampling=SamplingParams(max_tokens=5, temperature=0.5, top_k=3, seed=8, stop_token_ids=(4,), logprobs=2),
            phase=Phase.GENERATION_ONLY,
            context_phase_params=PARAMS,
            cache_salt="tenant",
            deadline_s=1.5,
        ),
        Abort(KEY.client_id),
        Abort(KEY.client_id, 2),
        Attach(1, 7),
        FrontendBeat(7),
        Detach(7),
        Drain(),
        Shutdown(2.5),
    ],
)
def test_whatever_a_frontend_sends_arrives_unchanged(body: WorkerBound) -> None:
    """Each member of `WorkerBound`, in its envelope."""
    envelope = RequestEnvelope(epoch=3, body=body)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=RequestEnvelope) == envelope


@pytest.mark.parametrize(
    "message",
    [
        ResponseBatch(
            3,
            [
                SequenceOutput(KEY, 0, pack_tokens([5]), cached_tokens=16),
                SequenceOutput(
                    KEY,
                    1,
                    pack_tokens([6]),
                    logprobs=(TokenLogprobs(-0.5, (6, 7), (-0.5, -1.5)),),
                    finish_reason=FinishReason.HANDOVER,
                    context_phase_params=PARAMS,
                ),
                SequenceOutput(KEY, 2, error=ErrorInfo(ErrorKind.INVALID, "no", "seed")),
            ],
        ),
        Heartbeat(3, 0.25, WorkerLoad(running=1, blocks=BlockCounts(free=4, leased=2))),
        Attached(1, 3, DESCRIPTION),
        AttachRefused(1, 3, "taken"),
        WorkerStopping(3, "shut down"),
    ],
)
def test_whatever_a_worker_sends_arrives_unchanged(message: FrontendBound) -> None:
    """Each member of `FrontendBound`."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FrontendBound) == message


def test_a_token_costs_few_bytes_on_the_wire() -> None:
    """One token of one sequence in a step's batch: defaults are left out, so that a stream stays cheap."""
    one = len(msgspec.msgpack.encode(ResponseBatch(3, [SequenceOutput(KEY, 9, pack_tokens([5]))])))
    two = len(msgspec.msgpack.encode(ResponseBatch(3, [SequenceOutput(KEY, 9, pack_tokens([5]))] * 2)))
    assert two - one <= 32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_ids": b""}, "at least one token"),
        ({"prompt_ids": b"\x01\x00\x00\x00\x02"}, "whole int32"),
        ({"generated_ids": b"\x01"}, "whole int32"),
        ({"phase": Phase.GENERATION_ONLY}, "context_phase_params"),
        ({"context_phase_params": PARAMS}, "context_phase_params"),
    ],
)
def test_an_impossible_request_cannot_be_made(changes: dict[str, object], problem: str) -> None:
    """The struct itself refuses, at the sender and, since decoding makes one, at the receiver."""
    with pytest.raises(ValueError, match=problem):
        make_request(**changes)


def test_an_impossible_request_cannot_be_decoded() -> None:
    """A peer that sends a cut-off token buffer gets no further than the decoder."""
    good = msgspec.msgpack.encode(RequestEnvelope(3, make_request()))
    fields = msgspec.msgpack.decode(good)
    fields[1]["prompt_ids"] = b"\x01\x02\x03\x04\x05"
    with pytest.raises(msgspec.ValidationError, match="whole int32"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=RequestEnvelope)


@pytest.mark.parametrize(
    "kind",
    [InvalidRequestError, OverloadedError, DeadlineError, AbortedError, TransferError, InternalRequestError],
)
def test_a_request_error_keeps_its_class_message_and_param(kind: type[RequestError]) -> None:
    """`to_info` and `from_info` are inverse."""
    error = from_info(kind("temperature must be from 0 to 100, not 200", "temperature").to_info())
    assert type(error) is kind
    assert str(error) == "temperature must be from 0 to 100, not 200"
    assert error.param == "temperature"


def test_block_counts_sum_to_the_total() -> None:
    """Every block is in exactly one state."""
    assert BlockCounts(free=1, cached=2, active=3, leased=4, reserved=5, quarantined=6).total == 21
