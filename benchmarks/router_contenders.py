"""The routers that `router_overhead` measures, each started with instant workers behind it."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from benchmarks.http_load import completion
from benchmarks.instant_worker import MODEL
from benchmarks.processes import await_line, running
from twostroke.frontend.tokenizer import TextModel
from twostroke.ipc.secret import new_secret, save_secret
from twostroke.ipc.supervise import READY_FD_VARIABLE, PartReady, decode_event

TWOSTROKE = "twostroke"
STEP_MS = 20
"""Pace of paced streams, in milliseconds a token."""
TEXT = " The quick brown fox jumps over the lazy dog and runs back into the wood before the night falls again."
"""What the instant workers say, one token after the other."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A router that serves.

    Attributes:
        name: As the report calls it.
        port: Of its HTTP endpoint.
        pid: Of the process that is measured.
        model: The model's served name.
        api_key: What it wants to see.
        paced_model: The model to ask for paced streams, where requests cannot say so themselves.
        takes_token_ids: Whether a prompt may be token ids; a text of as many words otherwise.
        keeps_pace: Whether its workers make a token of paced streams every `STEP_MS`, whatever else is to do.
    """

    name: str
    port: int
    pid: int
    model: str = MODEL
    api_key: str | None = None
    paced_model: str = MODEL
    takes_token_ids: bool = True
    keeps_pace: bool = True

    def request(self, prompt_tokens: int, tokens: int, *, stream: bool, step_ms: int = 0) -> bytes:
        """One completion request; its workers make a token every `step_ms` milliseconds (0: at once)."""
        # Ids of three digits, which every vocabulary has; words of as many letters.
        prompt = [100 + n % 800 for n in range(prompt_tokens)] if self.takes_token_ids else "abc " * prompt_tokens
        model = self.paced_model if step_ms else self.model
        fields: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": tokens, "seed": step_ms}
        fields |= {"temperature": 0, "ignore_eos": True}
        if stream:
            fields["stream"] = True
        return completion(msgspec.json.encode(fields), api_key=self.api_key)


@contextmanager
def twostroke(model: Path, folder: Path) -> Iterator[Contender]:
    """`twostroke router` as it is, with an API key, over a context and a generation worker.

    Args:
        model: Folder of the model whose tokenizer it uses.
        folder: For its files and logs.
    """
    secret_file, keys_file, config_file = folder / "secret", folder / "keys", folder / "router.yaml"
    save_secret(new_secret(), secret_file)
    api_key = secrets.token_hex(16)
    keys_file.write_text(api_key + "\n")
    tokens = TextModel.load(model).encode(TEXT, add_special_tokens=False)
    workers_log, log = folder / "workers.log", folder / "router.log"
    worker_command = [sys.executable, "-m", "benchmarks.instant_worker", str(secret_file), ",".join(map(str, tokens))]
    with running(worker_command, workers_log) as workers:
        context, generation = await_line(workers, workers_log, "workers: ").split()
        document = {
            "model": {"path": str(model)},
            "router": {"port": 0},
            "workers": {"context": [context], "generation": [generation]},
            "security": {"secret_file": str(secret_file), "api_keys_file": str(keys_file)},
        }
        config_file.write_text(yaml.safe_dump(document))
        environment = {READY_FD_VARIABLE: "1"}  # the announcement goes into the log
        command = [sys.executable, "-m", "twostroke.cli", "router", "--config", str(config_file)]
        with running(command, log, environment=environment) as router:
            yield Contender(TWOSTROKE, _announced_port(router, log), router.pid, api_key=api_key)


def _announced_port(router: "subprocess.Popen[bytes]", log: Path) -> int:
    start = '{"event":"ready"'
    ready = decode_event((start + await_line(router, log, start)).encode())
    if not isinstance(ready, PartReady):
        raise TypeError(f"not a readiness: {ready}")
    return int(ready.http.rpartition(":")[2])
