"""A worker whose model costs nothing: the real engine over a runner that answers at once.

Everything between the sockets and the runner is the product's own code (worker main, I/O thread, engine loop, engine,
scheduler, block manager), so what is measured with it is what a token costs beside the model. The token after `t` is
`t + 1`, and no token ends a sequence. `python -m benchmarks.instant_engine` is the worker process that `IpcExecutor`
starts; `load_instant_runner` stands in for the model in a worker of another kind.
"""

import sys
from collections.abc import Callable

import numpy as np

from twostroke.engine.interfaces import CacheMemory, ModelFacts, SampledToken, StepPlan, StepResult
from twostroke.protocol.config import EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.transfer import LayoutFingerprint
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


def load_instant_runner(model: ModelConfig, config: EngineConfig, progress: Callable[[str], None]) -> InstantRunner:
    """A `LoadRunner` that loads nothing."""
    del model, progress
    return InstantRunner(config.kv_cache.num_blocks or _BLOCKS, config.kv_cache.block_size)


def instant_config(streams: int) -> EngineConfig:
    """An engine that runs `streams` sequences at the same time; their prompts are not worth caching."""
    return EngineConfig(
        max_sequences=streams,
        max_batched_tokens=max(2048, streams),
        shutdown_s=5.0,
        kv_cache=KVCacheConfig(prefix_caching=False),
    )


if __name__ == "__main__":
    sys.exit(run_worker(load_runner=load_instant_runner))
