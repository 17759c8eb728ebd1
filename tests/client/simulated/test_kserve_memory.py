"""Shared memory of both kinds over the Open Inference Protocol, by Triton's own client, on a GPU whose driver is
simulated. Kernels leave their outputs as they were: what an output held before is what it holds afterwards.
"""

import base64
import contextlib
import ctypes
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from simulated_gpu import Gpu

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
import tritonclient.utils.shared_memory as shm  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("cuda") is None,
        reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]
SIDE = 128
NBYTES = SIDE * SIDE * 2
MODEL = "tilewright.gemm"
APART = [("grpc.use_local_subchannel_pool", 1)]
"""A client with a connection of its own: else it takes that of another one which was closed just now, if it can."""


@pytest.fixture
def asking(target: str) -> Iterator[Any]:
    with contextlib.closing(triton.InferenceServerClient(target, channel_args=APART)) as made:
        until = time.monotonic() + 60
        while not made.is_server_ready() and time.monotonic() < until:
            time.sleep(0.05)
        yield made


def handle(gpu: Gpu, address: int) -> bytes:
    """The driver's handle as Triton's client wants it."""
    made = (ctypes.c_char * 64)()
    gpu.call("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(address))
    return base64.b64encode(bytes(made))


def product(shared: str, output: str, output_offset: int = 0) -> tuple[list[Any], list[Any]]:
    """Both inputs from one region, the output into another or the same."""
    given = [triton.InferInput(name, [SIDE, SIDE], "BF16") for name in "ab"]
    for index, item in enumerate(given):
        item.set_shared_memory(shared, NBYTES, offset=index * NBYTES)
    wanted = triton.InferRequestedOutput("out")
    wanted.set_shared_memory(output, NBYTES, offset=output_offset)
    return given, [wanted]


def regions(found: Any) -> dict[str, int]:
    return {name: item.byte_size for name, item in found.regions.items()}


def test_all_six_calls_of_shared_memory_work_on_a_gpu(asking: Any, gpu: Gpu) -> None:
    asking.unregister_cuda_shared_memory()
    asking.unregister_system_shared_memory()
    address = gpu.allocate(4 * NBYTES)
    before = bytes(range(256)) * (NBYTES // 256)
    gpu.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address + 2 * NBYTES), before, ctypes.c_size_t(NBYTES))
    asking.register_cuda_shared_memory("device", handle(gpu, address), 0, 4 * NBYTES)
    name = f"kserve_gpu_{os.getpid()}"
    region = shm.create_shared_memory_region(name, f"/{name}", 3 * NBYTES)
    try:
        asking.register_system_shared_memory("host", f"/{name}", 3 * NBYTES)
        found = asking.get_cuda_shared_memory_status()
        assert regions(found) == {"device": 4 * NBYTES}
        assert found.regions["device"].device_id == 0
        assert regions(asking.get_cuda_shared_memory_status("device")) == {"device": 4 * NBYTES}
        assert regions(asking.get_system_shared_memory_status()) == {"host": 3 * NBYTES}
        given, wanted = product("device", "device", 2 * NBYTES)
        for _ in range(3):
            asking.infer(MODEL, given, outputs=wanted)
        after, stream = (ctypes.c_uint8 * NBYTES)(), gpu.stream()
        place = ctypes.c_uint64(address + 2 * NBYTES)
        gpu.call("cuMemcpyDtoHAsync_v2", after, place, ctypes.c_size_t(NBYTES), ctypes.c_uint64(stream))
        assert gpu.comes_to_rest(stream)
        assert bytes(after) == before
        # From the host's memory into the GPU's, and back.
        asking.infer(MODEL, *product("host", "device", 2 * NBYTES)[:1], outputs=product("host", "device")[1])
        asking.infer(MODEL, product("device", "host")[0], outputs=product("device", "host", 2 * NBYTES)[1])
        asking.unregister_cuda_shared_memory("device")
        assert not asking.get_cuda_shared_memory_status().regions
        with pytest.raises(InferenceServerException, match="no shared-memory region of that name"):
            asking.infer(MODEL, given, outputs=wanted)
        asking.unregister_system_shared_memory("host")
        assert not asking.get_system_shared_memory_status().regions
    finally:
        shm.destroy_shared_memory_region(region)


def test_device_memory_that_the_driver_did_not_give_or_that_is_smaller_is_refused(asking: Any, gpu: Gpu) -> None:
    address = gpu.allocate(NBYTES)
    for made, device, nbytes in (
        (base64.b64encode(b"\x5a" * 64), 0, NBYTES),
        (handle(gpu, address), 7, NBYTES),
        (handle(gpu, address), 0, 1 << 40),
    ):
        with pytest.raises(InferenceServerException):
            asking.register_cuda_shared_memory("wrong", made, device, nbytes)
    assert "wrong" not in asking.get_cuda_shared_memory_status().regions
    asking.register_cuda_shared_memory("small", handle(gpu, address), 0, NBYTES)
    with pytest.raises(InferenceServerException):  # beyond its end
        given, wanted = product("small", "small")
        asking.infer(MODEL, given, outputs=wanted)
    asking.unregister_cuda_shared_memory("small")


def test_device_memory_of_a_client_that_has_gone_is_gone(asking: Any, target: str, gpu: Gpu) -> None:
    address = gpu.allocate(NBYTES)
    asking.register_cuda_shared_memory("mine", handle(gpu, address), 0, NBYTES)
    asking.close()
    with contextlib.closing(triton.InferenceServerClient(target, channel_args=APART)) as other:
        until = time.monotonic() + 30
        while other.get_cuda_shared_memory_status().regions and time.monotonic() < until:
            time.sleep(0.05)
        assert not other.get_cuda_shared_memory_status().regions
