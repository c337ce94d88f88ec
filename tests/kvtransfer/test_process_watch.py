"""Watching another process exit."""

import subprocess
import sys

from kvtransfer.process_watch import host_name, is_elsewhere, watch_process


def test_an_exit_is_seen_and_other_hosts_are_not_watched() -> None:
    """The watch turns true with the exit, before the parent has even collected it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch = watch_process(host_name(), process.pid)
        assert watch is not None
        assert not watch.exited()
        assert watch_process("another host", process.pid) is None
        process.kill()
        process.wait()
        assert watch.exited()
        watch.close()
        assert watch_process(host_name(), 0) is None


def test_another_container_is_no_other_host() -> None:
    """Its pid namespace differs, its kernel does not; who names no host may be anywhere."""
    boot = host_name().partition(":")[0]
    assert not is_elsewhere(host_name())
    assert not is_elsewhere(f"{boot}:1")
    assert not is_elsewhere("")
    assert is_elsewhere("00000000-0000-0000-0000-000000000000:1")
