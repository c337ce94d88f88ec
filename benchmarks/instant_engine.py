"""An engine that costs nothing, in a worker that is real: what is measured around it is what the executor costs.

    InstantEngine   every sequence gets its next token in every step, at a cost linear in the sequences; no scheduler,
                    no blocks, no limits. A request's seed is its pace, in milliseconds a step; 0 is as fast as it goes
    InstantRunner   the model only: under the real engine it shows what that one's bookkeeping costs

The token after `t` is `t + 1`; nothing but `max_tokens` ends a sequence. `python -m benchmarks.instant_engine` is the
worker process that `IpcExecutor` starts: worker main, I/O thread, outbox, inbox and engine loop are the product's own.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import CacheMemory, ModelFacts, Runner, SampledToken, StepPlan, StepResult
from twostroke.protocol.config import EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.errors import AbortedError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import pack_tokens, token_count, unpack_tokens
from twostroke.protocol.transfer import LayoutFingerprint
from twostroke.protocol.worker import Role, WorkerLoad
from twostroke.worker.main import run_worker

VOCABULARY = 32_000
MAX_MODEL_LEN = 8192
_BLOCKS = 65_536
_HEAD_DIM = 2  # one float16 K and V of two elements: a token takes eight bytes of cache

MODEL = ModelConfig(served_name="instant")
"""Nothing is loaded, so it has no path."""


class InstantRunner:
    """A `Runner` that does nothing but count up, in time linear in the tokens of the step.

    Args:
        num_blocks: KV blocks.
        block_size: Tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        block_bytes = 2 * _HEAD_DIM * block_size * np.dtype(np.float16).itemsize
        memory = np.zeros(num_blocks * block_bytes, np.uint8)
        layout = LayoutFingerprint("instant", "float16", block_size, layers=1, kv_heads=1, head_dim=_HEAD_DIM)
        self.facts = ModelFacts(VOCABULARY, MAX_MODEL_LEN, (), layout, block_bytes)
        self.cache = CacheMemory(memory.ctypes.data, block_bytes, num_blocks, memory)

    def run(self, plan: StepPlan) -> StepResult:
        """The token after the last one of each slice that is sampled."""
        tokens = [
            SampledToken(draw.request_id, (part.token_ids[-1] + 1) % VOCABULARY, None)
            for part in plan.slices
            if part.sample
            for draw in part.draws()
        ]
        return StepResult(tokens, [])


@dataclass(slots=True)
class _Counting:
    """A sequence: what comes next, at which offset, and where it ends."""

    key: SequenceKey
    token: int
    offset: int
    end: int


class InstantEngine(Engine):
    """An `Engine` for whole requests whose steps are one pass over its sequences.

    Args:
        runner: Gives the facts of the model and is never run.
        config: Its bounds are not kept.
        role: `AGGREGATED`.
    """

    def __init__(self, runner: Runner, config: EngineConfig, role: Role) -> None:
        super().__init__(runner, config, role)
        self._blocks = super().load().blocks
        self._counting: dict[SequenceKey, _Counting] = {}
        self._given_up: list[SequenceOutput] = []
        self._pace_s = 0.0
        self._due = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something."""
        return bool(self._counting or self._given_up)

    @property
    def unfinished(self) -> bool:
        """Whether any sequence is left."""
        return bool(self._counting)

    def client_ids(self) -> set[int]:
        """The requests that run."""
        return {key.client_id for key in self._counting}

    def add(self, request: GenerationRequest, constraint: TokenConstraint | None = None) -> None:
        """Begin with every sequence of `request` at once; its pace is now everybody's."""
        del constraint
        self._pace_s = request.sampling.seed / 1000
        offset, last = token_count(request.generated_ids), unpack_tokens(request.prompt_ids + request.generated_ids)[-1]
        for key in request.keys:
            end = request.sampling.max_tokens or MAX_MODEL_LEN
            self._counting[key] = _Counting(key, (last + 1) % VOCABULARY, offset, end)

    def abort(self, client_id: int, index: int | None = None) -> list[SequenceKey]:
        """Give a request up, or one index of it."""
        keys = [key for key in self._counting if key.client_id == client_id and index in {None, key.index}]
        for key in keys:
            ended = self._counting.pop(key)
            self._given_up.append(SequenceOutput(key, ended.offset, error=AbortedError("aborted").to_info()))
        return keys

    def step(self) -> list[SequenceOutput]:
        """One token for each sequence."""
        if self._pace_s:
            self._await_turn()
        outputs, self._given_up = self._given_up, []
        for one in list(self._counting.values()):
            offset, one.offset = one.offset, one.offset + 1
            final = one.offset >= one.end
            reason = FinishReason.LENGTH if final else None
            outputs.append(SequenceOutput(one.key, offset, pack_tokens((one.token,)), finish_reason=reason))
            one.token = (one.token + 1) % VOCABULARY
            if final:
                del self._counting[one.key]
        return outputs

    def _await_turn(self) -> None:
        """Sleep until the step is due, as an engine does that waits for its device."""
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = time.monotonic() + self._pace_s

    def load(self) -> WorkerLoad:
        """How many sequences run; its blocks stay free."""
        return WorkerLoad(running=len(self._counting), blocks=self._blocks)


def load_instant_runner(model: ModelConfig, config: EngineConfig, progress: Callable[[str], None]) -> InstantRunner:
    """A `LoadRunner` that loads nothing."""
    del model, progress  # there is nothing to load, and nothing to tell
    return InstantRunner(config.kv_cache.num_blocks or _BLOCKS, config.kv_cache.block_size)


def instant_config(streams: int) -> EngineConfig:
    """Of a real engine: it runs `streams` sequences at the same time, and their prompts are not worth caching."""
    return EngineConfig(
        max_sequences=streams,
        max_batched_tokens=max(2048, streams),
        shutdown_s=5.0,
        kv_cache=KVCacheConfig(prefix_caching=False),
    )


if __name__ == "__main__":
    sys.exit(run_worker(load_runner=load_instant_runner, make_engine=InstantEngine))
