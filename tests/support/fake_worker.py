"""`python -m tests.support.fake_worker`: a real worker process around an instant runner, for tests that start many.

It takes its role from the launch spec, as the real entry points together do. The model's path may hold commands for
the runner, separated by commas: `slow=0.05` sleeps before each step, `crash=7` fails when the prompt starts with that
token, `load=3` takes three seconds to load, `broken` fails to, `block=8` lays its cache out in blocks of eight tokens.
"""

import sys
import time
from collections.abc import Callable

from tests.support.fake_runner import FakeRunner
from twostroke.engine.interfaces import Runner, StepPlan, StepResult
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import ModelError
from twostroke.protocol.worker import Role
from twostroke.worker.main import run_worker
from twostroke.worker.role_part import AggregatedPart, RoleContext, RolePart


class CommandedRunner(FakeRunner):
    """A fake runner that misbehaves on demand."""

    slow_s = 0.0
    crash_token: int | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Sleep, crash or run."""
        time.sleep(self.slow_s)
        if any(part.start == 0 and part.token_ids[0] == self.crash_token for part in plan.slices):
            raise RuntimeError("told to crash")
        return super().run(plan)


def load_fake_runner(model: ModelConfig, config: EngineConfig, progress: Callable[[str], None]) -> Runner:
    """Make the runner that the model's path describes."""
    progress("pretending to load")
    commands = dict(command.partition("=")[::2] for command in model.path.split(",") if command)
    time.sleep(float(commands.get("load", 0.0)))
    if "broken" in commands:
        raise ModelError(f"{model.path} is told to be broken")
    block_size = int(commands.get("block", config.kv_cache.block_size))
    runner = CommandedRunner(num_blocks=config.kv_cache.num_blocks or 64, block_size=block_size)
    runner.slow_s = float(commands.get("slow", 0.0))
    runner.crash_token = int(commands["crash"]) if "crash" in commands else None
    return runner


def make_part(context: RoleContext) -> RolePart:
    """The part of the role that the spec names."""
    match context.role:
        case Role.CONTEXT:
            from context_server.worker import make_context_part  # noqa: PLC0415 - loads the transfer libraries

            return make_context_part(context)
        case Role.GENERATION:
            from generation_server.worker import make_generation_part  # noqa: PLC0415 - likewise

            return make_generation_part(context)
        case Role.AGGREGATED:
            return AggregatedPart()


if __name__ == "__main__":
    sys.exit(run_worker(make_part, load_fake_runner))
