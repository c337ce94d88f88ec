"""The ctypes declarations against the C header that the library's wheel ships, and errors of UCX in words."""

import ctypes
import importlib.util
import mmap
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtransfer import ucp, ucx_binding
from kvtransfer.backend import BackendError, BlockBuffer, MemoryKind
from kvtransfer.options import SharedMemory
from kvtransfer.transports import allowed_transports
from kvtransfer.ucx import UcxBackend

STRUCTURES = {
    "ucp_params_t": (ucp.ContextParams, ["features", "name"]),
    "ucp_worker_params_t": (ucp.WorkerParams, ["thread_mode", "client_id"]),
    "ucp_ep_params_t": (ucp.EndpointParams, ["address", "err_mode", "flags"]),
    "ucp_mem_map_params_t": (ucp.MemoryMapParams, ["address", "length", "memory_type", "exported_memh_buffer"]),
    "ucp_request_param_t": (ucp.OperationParams, ["flags", "request", "memory_type", "memh"]),
}


def test_structures_are_laid_out_as_in_the_header(tmp_path: Path) -> None:
    """Sizes and offsets that a C compiler gives."""
    spec = importlib.util.find_spec("libucx")
    compiler = shutil.which("cc")
    if spec is None or spec.origin is None or compiler is None:
        pytest.skip("needs a C compiler and the libucx wheel's headers")
    lines = []
    for name, (_, fields) in STRUCTURES.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        lines += [f'printf("%zu\\n", offsetof({name}, {field}));' for field in fields]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <ucp/api/ucp.h>\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {"
        + "\n".join(lines)
        + 'printf("%zu %d %d %d %d\\n", sizeof(ucs_status_t), UCS_ERR_BUSY, UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE, '
        "UCS_MEMORY_TYPE_HOST, UCS_MEMORY_TYPE_CUDA); return 0; }\n"
    )
    include = Path(spec.origin).parent / "include"
    program = tmp_path / "layout"
    subprocess.run([compiler, f"-I{include}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    expected = []
    for structure, fields in STRUCTURES.values():
        expected.append(ctypes.sizeof(structure))
        expected += [getattr(structure, field).offset for field in fields]
    expected += [ctypes.sizeof(ucp.STATUS), ucp.STATUS_BUSY, ucp.MEMORY_FIELD_TYPE, *ucp.MEMORY_TYPES.values()]
    assert [int(number) for number in printed] == expected


def test_unknown_transports_are_named() -> None:
    """The message holds the option and UCX's words."""
    library = ucp.Ucp(ucx_binding.load_ucp())
    with pytest.raises(BackendError, match=r"could not start with .*nosuchnet"):
        library.create_context({"TLS": "nosuchnet"})
    with pytest.raises(BackendError, match="could not set NO_SUCH_OPTION"):
        library.create_context({"NO_SUCH_OPTION": "1"})


def test_a_status_in_place_of_a_pointer_is_an_error() -> None:
    """UCX answers with the largest pointers for codes from -100 to -1; lower ones are requests, and none is done."""
    library = ucp.Ucp(ucx_binding.load_ucp())
    with pytest.raises(BackendError, match=r"could not put: .* \(-25\)"):
        library._started(2**64 - 25, "put")
    assert library._started(2**64 - 101, "put") == 2**64 - 101
    assert library._started(None, "put") is None


def test_shared_memory_takes_more_than_a_closed_inlet() -> None:
    """Only without it is a closed inlet proof that nothing writes any more."""
    for setting, proof in ((SharedMemory.OFF, True), (SharedMemory.CMA, False)):
        backend = UcxBackend(allowed_transports(MemoryKind.HOST, setting), "lo")
        assert backend.close_is_proof is proof
        backend.close()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="what a GPU's driver says to host memory is its affair")
def test_memory_is_registered_as_the_kind_that_it_is_said_to_be() -> None:
    """Without a GPU, UCX refuses to take memory for that of one; the message names kind and address."""
    pages = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for kind in MemoryKind:
        backend = UcxBackend(allowed_transports(kind, SharedMemory.OFF), "lo")
        buffer = BlockBuffer(address, mmap.PAGESIZE, 1, pages, kind)
        if kind is MemoryKind.HOST:
            backend.register(buffer)
        else:
            with pytest.raises(BackendError, match=f"of cuda memory at {address:#x}"):
                backend.register(buffer)
        backend.close()


def test_without_a_binding_both_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, and what to set instead."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendError, match=r"ucxx-cu13 .* ucx-py"):
        ucx_binding.choose_binding()


def test_the_older_binding_serves_where_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """ucx-py's module is `ucp`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "ucp" else None)
    assert ucx_binding.choose_binding() == "ucp"
