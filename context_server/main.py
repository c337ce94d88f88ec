"""The context server's HTTP process. It never runs a model: its world does, in a process of its own."""

from twostroke.frontend.role_server import run_role_server
from twostroke.protocol.config import ClusterConfig
from twostroke.protocol.worker import Role

WORLD_MODULE = "context_server.worker"


def run(config: ClusterConfig) -> int:
    """Serve until a signal ends it; returns the exit code 0.

    Raises:
        ConfigError: A setting or the model is at fault.
        EngineDeadError: The world failed or died.
    """
    return run_role_server(Role.CONTEXT, WORLD_MODULE, config)
