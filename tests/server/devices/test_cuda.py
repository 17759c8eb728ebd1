"""Features of NVIDIA's GPUs alone: clusters, tensor maps, dependent launches; see ``test_gpu.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_device_harness import GPUS, Client, Gpu, N, get, put, stage

from tilewright_kit.contract.plan import I64, WORKSPACE, PixelWalk, Pointer, Struct, TensorMap
from tilewright_kit.types.errors import DeviceError, InternalError, InvalidArgumentError
from tilewright_server.devices.cuda.device import CudaDevice
from tilewright_server.devices.gpu.launch.program import GpuProgram

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kind() -> Gpu:
    return GPUS["cuda"]


def chained(gpu: CudaDevice, entry: Callable[[str], int]) -> GpuProgram:
    """out = x + 2 y, through the workspace."""
    first = Struct((Pointer("x"), Pointer("y"), Pointer(WORKSPACE), I64(N)))
    second = Struct((Pointer(WORKSPACE), Pointer("y"), Pointer("out"), I64(N)))
    stages = [stage(entry("add"), first), stage(entry("then_add"), second, dependent=True)]
    return gpu.program(stages, ["x", "y", "out"])


def test_clusters_are_launched(gpu: CudaDevice, entry: Callable[[str], int]) -> None:
    out = gpu.allocate(8 * 16)
    args = Struct((Pointer("out"),))
    for size in (1, 2, 4, 8):
        program = gpu.program([stage(entry("cluster"), args, grid=(16, 1, 1), cluster=(size, 1, 1))], ["out"])
        program.run([out.address], 0)
        assert (get(gpu, out, np.int64) == size).all()
    program = gpu.program([stage(entry("cluster"), args, grid=(15, 1, 1), cluster=(2, 1, 1))], ["out"])
    with pytest.raises(DeviceError):
        program.run([out.address], 0)


def test_all_of_the_shared_memory_can_be_used(gpu: CudaDevice, entry: Callable[[str], int]) -> None:
    out = gpu.allocate(8)
    args = Struct((Pointer("out"),))
    for nbytes in (1024, gpu.info.arch.lds_bytes, 64 << 10):
        gpu.program([stage(entry("shared_bytes"), args, grid=(1, 1, 1), shared_bytes=nbytes)], ["out"]).run(
            [out.address], 0
        )
        assert get(gpu, out, np.int64)[0] == nbytes // 4
    with pytest.raises(DeviceError):
        gpu.program([stage(entry("shared_bytes"), args, shared_bytes=gpu.info.arch.lds_bytes + 1024)], ["out"])


def test_tensor_maps_follow_the_addresses(gpu: CudaDevice, entry: Callable[[str], int]) -> None:
    tensor = TensorMap("x", 64, "fp32", (32, 8), (128,), (8, 8), 0)
    program = gpu.program(
        [stage(entry("tile"), Struct((tensor, Pointer("out"))), grid=(1, 1, 1), block=(64, 1, 1))], ["x", "out"]
    )
    for seed in (1, 2):
        values = np.random.default_rng(seed).random((9, 32), np.float32)
        x, out = put(gpu, values), gpu.allocate(256)
        program.run([x.address, out.address], 0)
        expected = values.reshape(-1)[16 : 16 + 8 * 32].reshape(8, 32)[:, :8]
        assert (get(gpu, out).reshape(8, 8) == expected).all()
    with pytest.raises(InvalidArgumentError) as caught:
        program.run([x.address + 4, out.address], 0)
    assert (caught.value.field, caught.value.rule) == ("x", "operand_alignment")


def test_maps_that_gather_pixels_are_encoded_where_their_corners_fit(
    gpu: CudaDevice, entry: Callable[[str], int]
) -> None:
    walk = PixelWalk((-1, -1), (1, 1), (2, 1))
    fits = TensorMap("x", 0, "fp16", (64, 10, 9, 2), (128, 1280, 11520), (64, 128), walk=walk)
    x, stream = gpu.allocate(64 * 10 * 9 * 2 * 2), gpu.open_stream()

    def bind(tensor: TensorMap) -> None:
        args = Struct((tensor, Pointer("x")))
        program = gpu.program([stage(entry("tile"), args, grid=(1, 1, 1), block=(64, 1, 1))], ["x"])
        stream.lane.bound(program, (x.address,), 0)

    bind(fits)
    for wrong in (replace(walk, lower=(-129, -1)), replace(walk, upper=(1, 128)), replace(walk, step=(9, 1))):
        with pytest.raises(DeviceError):
            bind(replace(fits, walk=wrong))
    for damaged in (
        replace(fits, walk=PixelWalk((-1,), (1,), (1,))),
        replace(fits, box=(64, 128, 1, 1)),
        replace(fits, dtype="bool"),
    ):
        with pytest.raises(InternalError) as caught:
            bind(damaged)
        assert caught.value.rule == "tensor_map"
    stream.close()


def test_dependent_stages_take_the_arguments_of_every_binding(gpu: CudaDevice, entry: Callable[[str], int]) -> None:
    program, stream, scratch = chained(gpu, entry), gpu.open_stream(), gpu.allocate(4 * N)
    for seed in (1, 2, 3, 1):
        x, y = np.full(N, seed, np.float32), np.arange(N, dtype=np.float32)
        buffers = [put(gpu, x), put(gpu, y), gpu.allocate(4 * N)]
        addresses = tuple(buffer.address for buffer in buffers)
        for _ in range(3):
            assert stream.launch(program, addresses, 0, 0, scratch.address) == 0
        stream.synchronize()
        assert (get(gpu, buffers[2]) == x + 2 * y).all()
    stream.close()


def test_new_kernels_run_while_another_stream_stands_still(
    gpu: CudaDevice, entry: Callable[[str], int], binary: Path
) -> None:
    """Kernels of a module that is loaded; the driver itself waits for all streams when it loads one."""
    flag, out, stream = gpu.allocate(8), gpu.allocate(8), gpu.open_stream()
    args = Struct((Pointer("out"),))
    gate = gpu.program([stage(entry("gate"), args, grid=(1, 1, 1), block=(1, 1, 1))], ["out"])
    function = gpu.load(binary).function("shared_bytes")
    stream.launch(gate, (flag.address,), 0, 0)
    begin = time.monotonic()
    gpu.program([stage(function, args, grid=(1, 1, 1), shared_bytes=100 << 10)], ["out"]).run([out.address], 0)
    assert time.monotonic() - begin < 30
    assert not stream.lane.is_idle
    assert get(gpu, out, np.int64)[0] == 25 << 10
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))
    stream.synchronize()
    stream.close()


def test_memory_that_cannot_be_mapped_is_not_called_too_small(
    gpu: CudaDevice, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, api = client.handle("fd"), gpu._driver.api.raw
    with monkeypatch.context() as patch:
        patch.setattr(api, "cuMemSetAccess", lambda *_: (api.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
        for nbytes in (4, (2 << 20) + 4):
            with pytest.raises(DeviceError) as caught:
                gpu.import_memory(replace(handle, nbytes=nbytes))
            assert caught.value.rule == "memory_kind"
    assert gpu.memory_use()["mappings"] == 0
    gpu.import_memory(replace(handle, nbytes=4))
