"""A scripted worker on a thread of the test's own process: real sockets, no start-up time."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.scripted_worker import ScriptedWorker
from twostroke.ipc.endpoint import EndpointOptions
from twostroke.ipc.launch import LaunchSpec
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.worker import Role

SECRET = bytes(range(32))


@contextmanager
def launch_spec(secret: bytes | None = SECRET, bind: str = "tcp://127.0.0.1:0") -> Iterator[LaunchSpec]:
    """A launch spec whose queues lie in a temporary directory with a short path."""
    directory = Path(tempfile.mkdtemp(prefix="ts-"))
    try:
        engine = EngineConfig(worker_bind=bind)
        yield LaunchSpec.draw(Role.AGGREGATED, ModelConfig(path="normal"), engine, secret=secret, directory=directory)
    finally:
        shutil.rmtree(directory)


@contextmanager
def worker_thread(options: EndpointOptions | None = None, bind: str = "tcp://127.0.0.1:0") -> Iterator[ScriptedWorker]:
    """A running worker; stopped, and its thread joined, at the end."""
    with launch_spec(bind=bind) as spec:
        worker = ScriptedWorker(spec, options)
        thread = threading.Thread(target=worker.run, name="scripted-worker")
        thread.start()
        try:
            yield worker
        finally:
            worker.frozen.clear()
            worker.stop()
            thread.join(10)
            assert not thread.is_alive()
