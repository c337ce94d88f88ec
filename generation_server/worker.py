"""`python -m generation_server.worker`: a worker world of the generation role. Started by its server, never by hand."""

import sys

from generation_server.lifecycle import GenerationPart
from twostroke.worker.main import run_worker
from twostroke.worker.role_part import RoleContext
from twostroke.worker.transfer import start_agent


def make_generation_part(context: RoleContext) -> GenerationPart:
    """The generation role's part over a running transfer agent.

    Raises:
        ConfigError: The agent cannot start.
    """
    return GenerationPart(context.engine, start_agent(context), context.config.transfer.timeout_s)


if __name__ == "__main__":
    sys.exit(run_worker(make_generation_part))
