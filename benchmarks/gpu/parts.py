"""The parts of the GPU benchmark, in the order in which they run, and the child process that runs one.

python -m benchmarks.gpu.parts NAME MODE FILE       the findings go to FILE, a failure's traceback to stderr
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.machine import Mode, open_machine


@dataclass(frozen=True, slots=True)
class Part:
    """One question, in a module and a process of its own.

    Attributes:
        name: Also the module's, whose `measure(machine, findings)` is run.
        deadline_s: It is killed after so long.
    """

    name: str
    deadline_s: float


PARTS = (
    Part("kernels", 110.0),
    Part("decode_attention", 45.0),
    Part("prefill_attention", 45.0),
    Part("model_steps", 100.0),
    Part("kv_transfer", 90.0),
    Part("interference", 150.0),
)


def run_part(name: str, mode: Mode, path: Path) -> None:
    """Run a part in this process."""
    module: Any = importlib.import_module(f"benchmarks.gpu.{name}")
    module.measure(open_machine(mode), Findings(name, path))


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    run_part(sys.argv[1], Mode(sys.argv[2]), Path(sys.argv[3]))
