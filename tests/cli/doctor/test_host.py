"""Reading a host: made-up trees of /sys, /proc and /dev, and the real one."""

import resource
from pathlib import Path

import pytest

from twostroke.cli.doctor.host import look_at_host


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    """A container may hide anything."""
    host = look_at_host(tmp_path)
    assert (host.rdma_devices, host.net_devices, host.nvidia_devices) == ((), (), 0)
    assert host.shared_memory is None
    assert host.memory is None


def test_devices_and_interfaces(tmp_path: Path) -> None:
    """Adapters by name, interfaces that are up without loopback, GPUs by their numbered device files."""
    files = {
        "sys/class/infiniband/mlx5_1/node_type": "1: CA",
        "sys/class/infiniband/mlx5_0/node_type": "1: CA",
        "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth1/operstate": "down\n",
        "sys/class/net/tap0/operstate": "unknown\n",
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "dev/nvidiactl": "",
    }
    host = look_at_host(_write(tmp_path, files))
    assert host.rdma_devices == ("mlx5_0", "mlx5_1")
    assert host.net_devices == ("eth0", "tap0")
    assert host.nvidia_devices == 2


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, 8 << 30),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 8 << 30),
        ({"sys/fs/cgroup/memory.max": "3000\n", "sys/fs/cgroup/memory.current": "1000\n"}, 2000),
        ({"sys/fs/cgroup/memory.max": "3000\n", "sys/fs/cgroup/memory.current": "4000\n"}, 0),
        ({"sys/fs/cgroup/memory.max": f"{16 << 30}\n"}, 8 << 30),
    ],
)
def test_usable_memory_is_the_less_of_kernel_and_container(
    tmp_path: Path, group: dict[str, str], expected: int
) -> None:
    """What the container has used counts against its limit."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n"
    assert look_at_host(_write(tmp_path, {"proc/meminfo": meminfo, **group})).memory == expected


def test_this_host() -> None:
    """The real tree: the installed binding and this process's own limits."""
    host = look_at_host()
    assert host.binding == "ucxx"
    assert any(name.startswith("ucxx-cu1") for name in host.bindings)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert host.open_files == (None if soft == resource.RLIM_INFINITY else soft)
    assert host.memory is not None
    assert host.memory > 0
