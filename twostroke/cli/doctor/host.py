"""Reads what the operating system says of this host. Every path hangs under a root, so that tests make hosts up."""

import importlib.metadata
import os
import resource
from pathlib import Path

from kvtransfer.backend import BackendError
from kvtransfer.ucx_binding import choose_binding
from twostroke.cli.doctor.facts import HostFacts

BINDING_PACKAGES = ("ucxx-cu13", "ucxx-cu12", "ucx-py-cu12", "ucx-py")
_KIB = 1024


def look_at_host(root: Path = Path("/")) -> HostFacts:
    """What this host is, as far as transfers and workers care."""
    return HostFacts(
        bindings=_installed_bindings(),
        binding=_chosen_binding(),
        nvidia_devices=len(list((root / "dev").glob("nvidia[0-9]*"))),
        rdma_devices=tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        net_devices=tuple(sorted(_live_interfaces(root))),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        shared_memory=_size_of(root / "dev/shm"),
        memory=_usable_memory(root),
    )


def _installed_bindings() -> tuple[str, ...]:
    found = []
    for package in BINDING_PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _chosen_binding() -> str | None:
    try:
        return choose_binding()
    except BackendError:
        return None


def _live_interfaces(root: Path) -> list[str]:
    """Network interfaces that are up; `unknown` is what virtual ones say that do not tell."""
    interfaces = (path for path in (root / "sys/class/net").glob("*") if path.name != "lo")
    return [path.name for path in interfaces if _text(path / "operstate") in {"up", "unknown"}]


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _size_of(mount: Path) -> int | None:
    try:
        space = os.statvfs(mount)
    except OSError:
        return None
    return space.f_frsize * space.f_blocks


def _usable_memory(root: Path) -> int | None:
    """What the kernel calls available, or what is left of the container's limit (cgroup v2) if that is less."""
    available = [
        int(line.split()[1]) * _KIB
        for line in (_text(root / "proc/meminfo") or "").splitlines()
        if line.startswith("MemAvailable:")
    ]
    group = root / "sys/fs/cgroup"
    limit, used = _text(group / "memory.max"), _text(group / "memory.current")
    if limit and limit.isdecimal():
        available.append(max(0, int(limit) - int(used or 0)))
    return min(available, default=None)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
