"""Fetches what `run_all` needs beside torch, triton, transformers and numpy, for a GPU machine without network.

    python -m benchmarks.gpu.fetch_wheels [FOLDER]            needs pip and a package index; git ignores the folder

They are for x86-64 and CPython 3.12 and take at most 64 MiB. How to use them there: benchmarks/gpu/README.md. numba and
llvmlite do not fit, and nothing here needs them. Of UCX the libraries alone are taken: its Python binding would bring
more than all others together.
"""

import argparse
import subprocess
import sys
from pathlib import Path

WHEELS = (
    "libucx-cu13==1.21.0",
    "llguidance==1.9.1",
    "markdown-it-py==4.3.0",
    "mdurl==0.1.2",
    "msgspec==0.23.0",
    "pygments==2.21.0",
    "pyzmq==27.3.0",
    "rich==15.0.0",
    "structlog==26.1.0",
)
MIB = 1 << 20
LIMIT_MIB = 64
_GLIBC_MINORS = (17, 24, 26, 27, 28, 31)
"""pip takes a platform's name by the letter: each wheel names some of these."""


def fetch(folder: Path) -> int:
    """Download all wheels, and nothing that they depend on; bytes of all.

    Raises:
        RuntimeError: They are more than `LIMIT_MIB`.
        subprocess.CalledProcessError: pip failed, and has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
    platforms.append("--platform=manylinux2014_x86_64")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.12", "--implementation=cp", *platforms, f"--dest={folder}", *WHEELS]
    subprocess.run(command, check=True)
    nbytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if nbytes > LIMIT_MIB * MIB:
        raise RuntimeError(f"the wheels in {folder} take {nbytes / MIB:.1f} MiB, more than {LIMIT_MIB}")
    return nbytes


def main() -> None:
    """Read the command line, fetch, say what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "wheels"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="where to (%(default)s)")
    folder: Path = parser.parse_args().folder
    nbytes = fetch(folder)
    print(f"{len(WHEELS)} wheels, {nbytes / MIB:.1f} MiB, in {folder}")


if __name__ == "__main__":
    main()
