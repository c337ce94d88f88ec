"""Watching another process exit."""

import subprocess
import sys

from kvtransfer.process_watch import is_elsewhere, this_process, watch_process
from twostroke.protocol.transfer import ProcessName

HOST = this_process().host


def test_an_exit_is_seen_and_other_hosts_are_not_watched() -> None:
    """The watch turns true with the exit, before the parent has even collected it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch = watch_process(ProcessName(HOST, process.pid))
        assert watch is not None
        assert not watch.exited()
        assert watch_process(ProcessName("another host", process.pid)) is None
        process.kill()
        process.wait()
        assert watch.exited()
        watch.close()
        assert watch_process(ProcessName(HOST, 0)) is None


def test_an_exit_before_the_watch_is_an_exit() -> None:
    """Nobody has the pid any more, which proves as much; there is no descriptor to poll."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        watch = watch_process(ProcessName(HOST, process.pid))
    assert watch is not None
    assert watch.exited()
    assert watch.fd is None
    watch.close()


def test_another_container_is_no_other_host() -> None:
    """Its pid namespace differs, its kernel does not; who names no host may be anywhere."""
    boot = HOST.partition(":")[0]
    assert not is_elsewhere(this_process())
    assert not is_elsewhere(ProcessName(f"{boot}:1", 1))
    assert not is_elsewhere(ProcessName())
    assert is_elsewhere(ProcessName("00000000-0000-0000-0000-000000000000:1", 1))
