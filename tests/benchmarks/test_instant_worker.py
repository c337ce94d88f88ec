"""The workers that benchmarks put behind a router keep the protocol, and the pace that a request asks for."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.instant_worker import InstantWorker
from twostroke.executor.remote import RemoteExecutor
from twostroke.ipc.secret import new_secret
from twostroke.protocol.ids import ClientIds, SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role

TOKENS = [pack_tokens([token]) for token in (7, 8, 9)]


@contextmanager
def _running(role: Role, secret: bytes, folder: Path) -> Iterator[InstantWorker]:
    worker = InstantWorker(role, secret, TOKENS, folder)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("step_ms", [0, 5])
async def test_both_roles_make_one_answer(tmp_path: Path, step_ms: int) -> None:
    """The context leg hands its token over, the generation leg goes on from there to the end, not faster than asked."""
    secret, ids = new_secret(), ClientIds(3)
    key = SequenceKey(ids.draw())
    sampling = SamplingParams(max_tokens=4, seed=step_ms)
    prompt = pack_tokens([1, 2, 3])
    for folder in ("context", "generation"):
        (tmp_path / folder).mkdir()
    with (
        _running(Role.CONTEXT, secret, tmp_path / "context") as context_worker,
        _running(Role.GENERATION, secret, tmp_path / "generation") as generation_worker,
    ):
        context = await RemoteExecutor.attach(context_worker.address, secret, ids)
        request = GenerationRequest(key=key, prompt_ids=prompt, sampling=sampling, phase=Phase.CONTEXT_ONLY)
        first = await context.submit(request).completion()
        assert (first.token_ids, first.finish_reason) == ([7], FinishReason.HANDOVER)
        assert first.context_phase_params is not None
        generation = await RemoteExecutor.attach(generation_worker.address, secret, ids)
        begun = time.monotonic()
        rest = await generation.submit(
            GenerationRequest(
                key=key,
                prompt_ids=prompt,
                sampling=sampling,
                generated_ids=pack_tokens(first.token_ids),
                phase=Phase.GENERATION_ONLY,
                context_phase_params=first.context_phase_params,
            )
        ).completion()
        assert (rest.token_ids, rest.finish_reason) == ([8, 9, 7], FinishReason.LENGTH)
        assert time.monotonic() - begun >= 3 * step_ms / 1000
        context.shutdown()
        generation.shutdown()
