"""What a worker on a GPU must never load: the compiler for CPUs, which its host need not have."""

import subprocess
import sys

import pytest

PROBE = """
import sys
sys.modules.update(numba=None, llvmlite=None)
import context_server.lifecycle, generation_server.lifecycle, twostroke.worker.transfer
import twostroke.engine.gpu_runner, twostroke.engine.engine, twostroke.engine.triton_sampling
import twostroke.engine.samplers, twostroke.engine.head_copy
"""


@pytest.mark.long
def test_no_compiler_for_cpus_is_imported() -> None:
    """Engine, runner, kernels and transfer start where numba and llvmlite are missing."""
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
