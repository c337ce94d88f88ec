"""Where the time of an engine step goes, told by Python's own profiler: a function's time counts for its file's part.

It is CPU time. A call of compiled code counts for the file that it was compiled from, or
for the one that calls it. The profiler itself adds about a
microsecond a call.
"""

import cProfile
import time
from collections.abc import Sequence
from types import CodeType
from typing import Any

from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import Runner
from twostroke.protocol.config import EngineConfig
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role

OTHER = "other"
PARTS = (
    ("engine/cpu_model/products", "matrix products"),
    ("engine/cpu_model/row_products", "matrix products"),
    ("engine/attention/", "attention"),
    ("engine/cpu_model/", "norms, rotation, activation"),
    ("engine/sampl", "sampling"),
    ("engine/logit_shaping", "sampling"),
    ("engine/cpu_sampling", "sampling"),
    ("engine/packing", "packing"),
    ("twostroke/", "scheduling, accounts, outputs"),
    ("site-packages/", "model library"),
)
"""By a piece of the file's path, the first that fits: what its functions do."""


def step_parts(runner: Runner, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, float]:
    """CPU milliseconds of each part in a step that decodes all `prompts`, the mean of `steps`."""
    config = EngineConfig(max_sequences=len(prompts))
    engine = Engine(runner, config, Role.AGGREGATED)
    sampling = SamplingParams(max_tokens=2 * steps + len(prompts), temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(key=SequenceKey(number), prompt_ids=pack_tokens(prompt), sampling=sampling))
    while len(engine.step()) < len(prompts):  # until the last prompt is computed
        pass
    profile = cProfile.Profile(time.thread_time)  # other programs' time is none of the step's
    profile.enable()
    for _ in range(steps):
        engine.step()
    profile.disable()
    return {part: seconds / steps * 1e3 for part, seconds in by_part(profile.getstats()).items()}


def by_part(entries: Sequence[Any]) -> dict[str, float]:
    """Seconds of each part; those of a built-in function count for its callers.

    Args:
        entries: What a profiler's `getstats` gives.
    """
    seconds: dict[str, float] = {}
    for entry in entries:
        if isinstance(entry.code, CodeType):
            builtins = sum(call.inlinetime for call in entry.calls or () if not isinstance(call.code, CodeType))
            part = part_of(entry.code.co_filename)
            seconds[part] = seconds.get(part, 0.0) + entry.inlinetime + builtins
    return seconds


def part_of(path: str) -> str:
    """What the functions of a file do in a step."""
    return next((part for piece, part in PARTS if piece in path), OTHER)
