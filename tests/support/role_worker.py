"""Scripted workers of the two roles behind real sockets, each on a thread of the test: no engine, no KV transfer.

A context worker answers with its first token and a hand-over; a generation worker goes on from there.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.support.fake_remote import context_phase_params
from tests.support.scripted_worker import ScriptedWorker, _Running
from twostroke.ipc.launch import LaunchSpec
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.requests import Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.worker import Role

MODEL = "normal"
JOIN_S = 5.0


class RoleWorker(ScriptedWorker):
    """Runs the phase that a request names.

    Attributes:
        closed: Set once its sockets are closed.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(spec)
        self.closed = threading.Event()

    def run(self) -> None:
        """As `ScriptedWorker.run`."""
        super().run()
        self.closed.set()

    def _output(self, entry: _Running) -> SequenceOutput | None:
        output = super()._output(entry)
        request = entry.request
        if output is None or request.phase is Phase.FULL:
            return output
        limit = request.sampling.max_tokens or 1
        output = msgspec.structs.replace(output, finish_reason=FinishReason.LENGTH if entry.made >= limit else None)
        if request.phase is Phase.GENERATION_ONLY or output.final:
            return output
        return msgspec.structs.replace(
            output,
            finish_reason=FinishReason.HANDOVER,
            cached_tokens=1,
            context_phase_params=context_phase_params(request, output.token_ids),
        )


@contextmanager
def running_worker(role: Role, secret: bytes, *, bind: str = "tcp://127.0.0.1:0") -> Iterator[RoleWorker]:
    """A worker of `role` that frontends with `secret` may attach to; it says goodbye at the end."""
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineConfig(worker_bind=bind)
        spec = LaunchSpec.draw(role, ModelConfig(path=MODEL), engine, secret=secret, directory=Path(folder))
        worker = RoleWorker(spec)
        thread = threading.Thread(target=worker.run, name=f"{role} worker")
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(JOIN_S)
            assert not thread.is_alive()
