"""Run one stage of making a model as a process: its lines are progress, its error stream is shown only if it fails."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

from twostroke.protocol.errors import ModelError

Report = Callable[[str], None]


def run_stage(command: Sequence[str], deadline_s: float, hint: str, report: Report | None = None) -> None:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        deadline_s: It is killed after so many seconds.
        hint: What to do if it fails.
        report: Told of each line that it prints.

    Raises:
        ModelError: It failed or took too long.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        # The command is made of this package's own words.
        with subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            _follow(process, deadline_s, report)
        if process.returncode != 0:
            errors.seek(0)
            sys.stderr.write(errors.read())
            raise ModelError(f"`{' '.join(command)}` ended with {process.returncode}; {hint}")


def _follow(process: subprocess.Popen[str], deadline_s: float, report: Report | None) -> None:
    """Pass lines on until the process has closed its output; kill it at the deadline or when interrupted."""
    alarm = threading.Timer(deadline_s, process.kill)
    alarm.start()
    try:
        for line in process.stdout or ():
            if report is not None and line.strip():
                report(line.strip())
        process.wait()
    except BaseException:
        process.kill()
        raise
    finally:
        alarm.cancel()
