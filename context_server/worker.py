"""`python -m context_server.worker`: a worker world of the context role. Started by its server, never by hand."""

import sys

from context_server.lifecycle import ContextPart
from twostroke.worker.main import run_worker
from twostroke.worker.role_part import RoleContext
from twostroke.worker.transfer import start_agent


def make_context_part(context: RoleContext) -> ContextPart:
    """The context role's part over a running transfer agent.

    Raises:
        ConfigError: The agent cannot start.
    """
    return ContextPart(context.engine, start_agent(context), context.config.transfer.lease_s)


if __name__ == "__main__":
    sys.exit(run_worker(make_context_part))
