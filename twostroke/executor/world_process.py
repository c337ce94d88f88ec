"""The process of a worker world's rank, as its launcher holds it: by pidfd, so that its end is an event.

running --exits or is killed--> ended (its pidfd is readable) --reap--> reaped --close--> closed
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import zmq

from twostroke.ipc.launch import LAUNCH_FD_VARIABLE, LaunchSpec, write_launch_spec
from twostroke.ipc.supervise import PARENT_PID_VARIABLE, READY_FD_VARIABLE


class WorldProcess:
    """Starts `python -m MODULE` with a launch spec.

    The process dies with the *thread* that makes this object (the kernel watches threads), so that thread lives as long
    as the world. It runs in a process group of its own: a Ctrl-C in a terminal reaches the launcher alone.

    Args:
        module: What to run; it reads its spec with `read_launch_spec`.
        spec: Sent through a pipe.
        rank: Rank in the world, for messages.

    Raises:
        ConfigError: The spec is too large.
    """

    def __init__(self, module: str, spec: LaunchSpec, rank: int = 0) -> None:
        self.rank = rank
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                [sys.executable, "-m", module],
                pass_fds=(read_end,),
                env=_environment(os.environ, read_end),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self.pidfd = os.pidfd_open(self._process.pid)
        try:
            write_launch_spec(write_end, spec)
        except BrokenPipeError:
            pass  # it died before it could read; its pidfd says so
        except BaseException:
            self.kill()
            self.reap(5.0)
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code once reaped, minus the signal if one killed it."""
        return self._process.returncode

    def reap(self, timeout_s: float) -> bool:
        """Wait for its end and collect the exit code; False if it still runs after `timeout_s`."""
        poller = zmq.Poller()
        poller.register(self.pidfd, zmq.POLLIN)
        if not poller.poll(int(timeout_s * 1000)):
            return False
        self._process.wait()
        return True

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); nothing happens if it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL); nothing happens if it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return  # it has ended

    def end(self, grace_s: float) -> None:
        """Let it end by itself within `grace_s`, then kill it; it is reaped afterwards."""
        if not self.reap(grace_s):
            self.kill()
            self.reap(5.0)

    def how_it_ended(self) -> str:
        """Rank, pid and the signal or exit code, for people."""
        who = f"rank {self.rank} (pid {self.pid})"
        code = self.exit_code
        if code is None:
            return f"{who} still runs"
        if code >= 0:
            return f"{who} exited with code {code}"
        return f"{who} was killed by signal {signal.Signals(-code).name}"

    def close(self) -> None:
        """Free the pidfd; after reaping."""
        os.close(self.pidfd)


def _environment(inherited: Mapping[str, str], launch_fd: int) -> dict[str, str]:
    """The environment of a rank: the launcher's, with the launch variables, without what was meant for the launcher."""
    environment = {name: value for name, value in inherited.items() if name != READY_FD_VARIABLE}
    environment[LAUNCH_FD_VARIABLE] = str(launch_fd)
    environment[PARENT_PID_VARIABLE] = str(os.getpid())
    return environment
