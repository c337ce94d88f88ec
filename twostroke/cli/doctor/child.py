"""Runs a probe in a process of its own, so that a driver that crashes or hangs is a finding and not the doctor's end.

    doctor  --question as JSON, an argument-->  child (leader of a process group)
            <--answer as JSON on stdout-------
            --SIGKILL to the group at the deadline, or when the doctor is interrupted-->

Whatever libraries print goes to the child's stderr; only its last line is shown, and only if there is no answer.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from twostroke.cli.doctor.facts import ProbeFault

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChildProbe:
    """One module to run.

    Attributes:
        module: Run with `python -m`.
        deadline_s: It is killed after so many seconds.
        question: Given to it as JSON; None for none.
    """

    module: str
    deadline_s: float
    question: msgspec.Struct | None = None


class RunProbe(Protocol):
    """How the doctor asks a probe; tests answer in its place."""

    async def __call__(self, probe: ChildProbe, answer: type[T]) -> T | ProbeFault:
        """The answer of `probe`, or what happened instead."""
        ...


async def run_probe(probe: ChildProbe, answer: type[T]) -> T | ProbeFault:
    """Run a probe's child to its end or its deadline."""
    command = [sys.executable, "-m", probe.module]
    if probe.question is not None:
        command.append(msgspec.json.encode(probe.question).decode())
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), probe.deadline_s)
    except TimeoutError:
        return ProbeFault(f"did not answer in {probe.deadline_s:g} s and was killed")
    finally:
        await _kill_group(process)
    if process.returncode:
        return ProbeFault(_end(process.returncode, errors.decode(errors="replace")))
    try:
        return msgspec.json.decode(output, type=answer)
    except msgspec.DecodeError as error:
        return ProbeFault(f"gave no proper answer: {error}")


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    """End a child and whatever it started; does nothing once they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _end(status: int, errors: str) -> str:
    lines = errors.strip().splitlines()
    last = f": {lines[-1].strip()}" if lines else ""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}{last}"
    return f"failed with status {status}{last}"


@contextlib.contextmanager
def answer_stream() -> Iterator[BinaryIO]:
    """In a child: the way of its answer. What anyone else writes to standard output goes to standard error."""
    with os.fdopen(os.dup(1), "wb") as stream:
        os.dup2(2, 1)
        yield stream
