"""`twostroke up` from a configuration to an exit status."""

import asyncio
import json
import shlex
from pathlib import Path

import httpx
from rich.console import Console

from twostroke.cli.errors import EXIT_FAILURE, EXIT_WRONG_CONFIG
from twostroke.cli.up.display import Display, make_display
from twostroke.cli.up.launch_dir import LaunchDir
from twostroke.cli.up.part import Part, PartCommand, PartFailedError
from twostroke.cli.up.plan import LaunchPlan, PartPlan, make_plan, reachable
from twostroke.cli.up.ports import PortPicker
from twostroke.cli.up.supervisor import StartTimeoutError, Supervisor
from twostroke.ipc.supervise import announce_ready
from twostroke.protocol.config import ClusterConfig

_START_TIMEOUT_S = 600.0
_PROBE_EVERY_S = 0.1
_LINES_SHOWN = 20
_QUESTION = "What is the capital of France?"


def run(config: ClusterConfig, log_dir: Path | None) -> int:
    """Start everything, serve until asked to stop, and leave nothing behind.

    Args:
        config: What to start; `model.path` is set.
        log_dir: Where logs are kept; None keeps none.

    Raises:
        ConfigError: A port is taken or an address cannot be used; nothing was started.
    """
    with LaunchDir(log_dir) as launch:
        plan = make_plan(config, PortPicker(), str(launch.secret_file))
        display = make_display(Console())
        try:
            return _supervise(plan, launch, display)
        finally:
            display.close()


def _supervise(plan: LaunchPlan, launch: LaunchDir, display: Display) -> int:
    def make_part(planned: PartPlan) -> Part:
        command = PartCommand.of(planned, launch)
        return Part(command, lambda part, words: display.step(part.name, part.state, words))

    async def main() -> None:
        servers = [make_part(planned) for planned in plan.servers]
        supervisor = Supervisor(
            servers, make_part(plan.router), lambda: _until_cluster_answers(plan.router.http), _START_TIMEOUT_S
        )
        await supervisor.run(lambda: _tell_ready(plan, display))

    try:
        asyncio.run(main())
    except PartFailedError as error:
        _show_log(launch, error.name, display)
        display.say(f"twostroke: error: {error}")
        return EXIT_WRONG_CONFIG if error.code == EXIT_WRONG_CONFIG else EXIT_FAILURE
    except StartTimeoutError as error:
        for part in (*plan.servers, plan.router):
            _show_log(launch, part.name, display)
        display.say(f"twostroke: error: {error}")
        return EXIT_FAILURE
    display.say("stopped")
    return 0


async def _until_cluster_answers(http: str) -> None:
    """Poll the router until it has a live worker in each role."""
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        while True:
            try:
                response = await client.get(f"{http}/ready")
            except httpx.TransportError:
                pass
            else:
                if response.is_success:
                    return
            await asyncio.sleep(_PROBE_EVERY_S)


def _tell_ready(plan: LaunchPlan, display: Display) -> None:
    config = plan.router.config
    admin = f"http://{reachable(config.router.admin_host)}:{config.router.admin_port}"
    display.say(
        f"\n{config.model.name} is served at {plan.router.http}/v1 (admin: {admin})\n"
        f"Try:\n  {curl_line(plan.router.http, config)}\n"
        "Ctrl-C stops everything.\n"
    )
    announce_ready(plan.router.http, admin=admin)


def curl_line(http: str, config: ClusterConfig) -> str:
    """A command that asks the served model a question."""
    body = {
        "model": config.model.name,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 64,
        "temperature": 0,
    }
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if config.security.api_keys_file else ""
    return (
        f"curl {http}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    )


def _show_log(launch: LaunchDir, part: str, display: Display) -> None:
    lines = launch.last_lines(part, _LINES_SHOWN)
    if lines:
        display.say(f"--- last lines of {part} ---")
        display.say("\n".join(lines))
