"""An engine in a process of its own, in one role, for `interference`: requests come in, outputs go out.

    python -m benchmarks.gpu.role_process FD MODE ROLE CHUNK

It goes the round of a worker's engine loop: take requests, role part, engine step, role part, answer. Every output
carries the moment at which its step had ended, by `time.monotonic()`, which all processes of a host share.
"""

import contextlib
import os
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait

import msgspec
import structlog

from benchmarks.gpu.llama import make_cache, make_llama, make_runner
from benchmarks.gpu.machine import Machine, Mode, open_machine
from benchmarks.gpu.role_messages import Answer, Made, Ready
from context_server.lifecycle import ContextPart
from generation_server.lifecycle import GenerationPart
from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import CacheMemory
from twostroke.protocol.config import EngineConfig, KVCacheConfig
from twostroke.protocol.ids import draw_epoch
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.worker import Role
from twostroke.worker.role_part import AggregatedPart, RoleContext, RolePart
from twostroke.worker.transfer import start_agent

MAX_MODEL_LEN = 12288
CACHE_TOKENS = 98304
MAX_SEQUENCES = 32
_SECRET = bytes(range(32))
_LEASE_S = 30.0
_IDLE_S = 0.05
_CLOSE_S = 2.0


class RoleProcess:
    """The engine and its role part."""

    def __init__(self, connection: Connection, machine: Machine, role: Role, chunk: int) -> None:
        tiny = machine.rehearses
        model = make_llama(machine, 256 if tiny else MAX_MODEL_LEN)
        cache = make_cache(machine, model, 1024 if tiny else CACHE_TOKENS)
        runner = make_runner(machine, model, cache)
        sequences = 4 if tiny else MAX_SEQUENCES
        if role is not Role.CONTEXT and not tiny:  # in rehearsal `model_steps` captures
            runner.capture(machine.open_device(), sequences)
        kv = KVCacheConfig(block_size=cache.geometry.block_size, prefix_caching=False)
        config = EngineConfig(max_batched_tokens=chunk, max_sequences=sequences, kv_cache=kv)
        self._connection = connection
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._engine = Engine(runner, config, role)
        memory: CacheMemory = replace(runner.cache, gpu=None) if tiny else runner.cache
        self._part = _make_part(RoleContext(role, self._engine, draw_epoch(), config, _SECRET, memory, self._wake))

    def run(self) -> None:
        """Until the other end of the pipe is closed."""
        with contextlib.suppress(EOFError, ConnectionError):
            self._say(Ready())
            while True:
                self._take()
                self._part.before_step()
                outputs = self._engine.step()
                outputs += self._part.after_step()
                if outputs:
                    self._say(Made(time.monotonic(), outputs))
        self._part.close(_CLOSE_S)

    def _take(self) -> None:
        """Take in all requests that wait, or else wait a little for one or for the transfer."""
        patience = 0.0 if self._engine.has_work else _IDLE_S
        while ready := wait([self._connection, self._woken], patience):
            patience = 0.0
            if self._woken in ready:
                os.eventfd_read(self._woken)
            if self._connection in ready:
                request = msgspec.msgpack.decode(self._connection.recv_bytes(), type=GenerationRequest)
                self._part.check(request)
                self._engine.add(request)

    def _say(self, answer: Answer) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(answer))

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)


def _make_part(context: RoleContext) -> RolePart:
    match context.role:
        case Role.CONTEXT:
            return ContextPart(context.engine, start_agent(context), _LEASE_S)
        case Role.GENERATION:
            return GenerationPart(context.engine, start_agent(context), _LEASE_S)
        case _:
            return AggregatedPart()


def main() -> None:
    """Read the command line, and serve."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    fd, mode, role, chunk = sys.argv[1:]
    RoleProcess(Connection(int(fd)), open_machine(Mode(mode)), Role(role), int(chunk)).run()


if __name__ == "__main__":
    main()
