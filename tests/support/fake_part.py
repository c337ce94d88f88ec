"""A stand-in for a server, run as a process by the supervisor's tests: `python -m tests.support.fake_part MODE [ARGS]`.

ready            announce and wait for SIGTERM
stubborn         announce and ignore SIGTERM
wrong-config     complain and exit 2
crash            exit 3 before announcing
flaky FILE       crash as often as FILE has lines left, taking one each time; then be `ready`
silent           never announce
parent           announce with the pid of a child that would outlive it
"""

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from twostroke.ipc.supervise import announce_progress, announce_ready, die_with_supervisor

ENDLESS_S = 60.0


def main(mode: str, arguments: list[str]) -> int:
    """Behave as `mode` says."""
    announce_progress("loading")
    if mode == "wrong-config":
        sys.stderr.write("twostroke: error: cluster.yaml: context.port: Expected `int`\n")
        return 2
    if mode == "crash" or (mode == "flaky" and _takes_a_line(Path(arguments[0]))):
        return 3
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "parent":
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({ENDLESS_S})"], process_group=0)
        announce_progress(str(child.pid))
    if mode != "silent":
        announce_ready("http://127.0.0.1:1")
    if mode == "answering":
        HTTPServer(("127.0.0.1", int(arguments[0])), Answering).serve_forever()
    time.sleep(ENDLESS_S)
    return 0


class Answering(BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self) -> None:
        """Answer with 200."""
        self.send_response(200)
        self.end_headers()


def _takes_a_line(file: Path) -> bool:
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[1:]))
    return bool(lines)


if __name__ == "__main__":
    die_with_supervisor(os.environ)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
