"""Watching another process exit."""

import subprocess
import sys

from kvtransfer.process_watch import host_name, watch_process


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
