"""The service on simulated AMD GPUs, end to end: a server with two of them, kernels compiled just in time and run by
the emulator, and this process as a client whose tensors are the GPU's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hip_service import SERVE, Gpu, OnGpu, check, operands, serving
from simulated_hip import environment, library, marks  # noqa: F401

import tilewright as tw
from tilewright.gpu import hip

pytestmark = [*marks, pytest.mark.slow]
ARCHS = ("gfx942", "gfx1201")
DEVICES = ("hip:0", "hip:1")
PART = 2 << 20
FLOAT8 = ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def target(
    library: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    kernel_cache: Path,
) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("service"), kernel_cache, environment(library, ",".join(ARCHS))) as address:
        yield address


@pytest.fixture(scope="module")
def gpu(library: Path) -> Iterator[Gpu]:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(library, ",".join(ARCHS)).items():
            if name.startswith("TW_SIM_"):
                patch.setenv(name, value)
        path = library / "libamdhip64.so"
        patch.setattr(hip, "LIBRARIES", (str(path),))
        patch.setattr(hip, "_loaded", None)
        yield Gpu(path)


@pytest.fixture
def client(target: str, gpu: Gpu) -> Iterator[tw.Client]:
    gpu.use(0)
    with tw.connect(target) as opened:
        yield opened


@pytest.mark.extended
def test_the_server_shows_both_devices(client: tw.Client) -> None:
    shown = {device.id: (device.kind, device.arch) for device in client.session.devices}
    assert {name: shown[name] for name in DEVICES} == dict(zip(DEVICES, (("hip", arch) for arch in ARCHS), strict=True))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [*(("hip:0", dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.int8, FLOAT8)), ("hip:1", FLOAT8)],
)
@pytest.mark.some(2)
def test_products_of_host_arrays_are_right(client: tw.Client, device: str, dtype: Any) -> None:
    a, b = operands(dtype)
    check(client.gemm(a, b, device=device), a, b)
    assert client.report.device == device
    assert client.report.kernels[0].startswith("gemm_")


@pytest.mark.parametrize(("ordinal", "kind"), [(0, "legacy"), (0, "mapped"), (1, "legacy")])
@pytest.mark.extended
def test_memory_of_this_process_is_used_in_place(client: tw.Client, gpu: Gpu, ordinal: int, kind: str) -> None:
    gpu.use(ordinal)
    base = gpu.mapped(PART) if kind == "mapped" else gpu.allocate(PART)
    a, b = operands(np.float16)
    out = OnGpu(gpu, np.zeros((64, 48), np.float16), base + 2 * (PART // 4))
    given = OnGpu(gpu, a, base), OnGpu(gpu, b, base + PART // 4)
    for _ in range(2):
        assert client.gemm(*given, out=out) is out
    check(out.numpy(), a, b)
    assert client.report.device == f"hip:{ordinal}"
    assert client.report.bytes_copied == 0
    assert len(client.session.exports) == 1


def test_the_server_allocates_what_nobody_gave(client: tw.Client, gpu: Gpu) -> None:
    a, b = operands(np.float32)
    result = client.gemm(OnGpu(gpu, a), OnGpu(gpu, b))
    assert isinstance(result, tw.DeviceArray)
    check(result.numpy(), a, b)
    assert result.__dlpack_device__() == (10, 0)
    filled = client.device_empty((64, 96), "fp32", device="hip:0")
    filled.copy_from(a)
    check(client.gemm(filled, OnGpu(gpu, b)).numpy(), a, b)


def test_launches_wait_for_streams_and_streams_for_them(client: tw.Client, gpu: Gpu) -> None:
    stream = gpu.stream()
    a, b = operands(np.float16)
    given = [OnGpu(gpu, array, stream=stream) for array in (a, b, np.zeros((64, 48), np.float16))]
    bound = client.plan_gemm(*given[:2]).bind(*given[:2], out=given[2])
    release = gpu.hold(stream)
    launch = bound.launch(stream=stream)
    time.sleep(0.1)
    assert not launch.done
    assert not gpu.idle(stream)
    assert not given[2].numpy().any()
    release()
    assert launch.synchronize() is given[2]
    check(given[2].numpy(), a, b)


def test_pipelines_keep_their_order(client: tw.Client, gpu: Gpu) -> None:
    stream = gpu.stream()
    turn = np.eye(32, dtype=np.float32)[np.roll(np.arange(32), 1)]
    x = OnGpu(gpu, np.eye(32, dtype=np.float32), stream=stream)
    y, by = OnGpu(gpu, np.zeros((32, 32), np.float32), stream=stream), OnGpu(gpu, turn, stream=stream)
    plan = client.plan_gemm(x, by)
    there, back = plan.bind(x, by, out=y), plan.bind(y, by, out=x)
    with client.pipeline(stream=stream) as pipeline:
        for _ in range(4):
            pipeline.launch(there)
            pipeline.launch(back)
    deadline = time.monotonic() + 20
    while not gpu.idle(stream) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (x.numpy() == np.linalg.matrix_power(turn, 8)).all()


def test_memory_that_was_freed_is_noticed(client: tw.Client, gpu: Gpu) -> None:
    a, b = operands(np.float16)
    other = OnGpu(gpu, b)
    for _ in range(2):  # the second time at the same addresses, perhaps
        given = OnGpu(gpu, a)
        check(client.gemm(given, other).numpy(), a, b)
        gpu.call("hipFree", ctypes.c_uint64(given.address))
        with pytest.raises(tw.InvalidArgumentError) as caught:
            client.gemm(given, other)
        assert caught.value.rule == "device_memory_kind"
    client.release_exports()
    assert not client.session.exports


def test_views_of_the_servers_memory_are_known_as_such(client: tw.Client, gpu: Gpu) -> None:
    a, b = operands(np.float32)
    mine = client.device_empty(a.shape, "fp32", device="hip:0")
    mine.copy_from(a)
    view = OnGpu(gpu, a, mine.__cuda_array_interface__["data"][0])
    check(client.gemm(view, OnGpu(gpu, b)).numpy(), a, b)
    assert mine.__cuda_array_interface__["data"][0] not in {base for base, _ in client.session.exports}


def test_operands_of_two_devices_are_refused(client: tw.Client, gpu: Gpu) -> None:
    a, b = operands(np.float16)
    first = OnGpu(gpu, a)
    gpu.use(1)
    with pytest.raises(tw.InvalidArgumentError, match="HIP device 1") as caught:
        client.gemm(first, OnGpu(gpu, b))
    assert caught.value.rule == "one_device"


BORROWING = """
import sys
import numpy as np
from hip import hip
import tilewright as tw

def made(answer):
    assert not answer[0], answer
    return answer[1]

a, b = (np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % (7 + turn) for turn in range(2))
stream = made(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking))
given = [made(hip.hipMalloc(a.nbytes)).configure(typestr="float32", shape=a.shape) for _ in range(3)]
for place, values in zip(given, (a, b, a)):
    made((*hip.hipMemcpyAsync(place, values, a.nbytes, hip.hipMemcpyKind.hipMemcpyHostToDevice, stream), None))
with tw.connect(sys.argv[1]) as client:
    client.plan_gemm(*given[:2]).launch(*given[:2], out=given[2], stream=stream)
    found = np.empty_like(a)
    made((*hip.hipMemcpyAsync(found, given[2], a.nbytes, hip.hipMemcpyKind.hipMemcpyDeviceToHost, stream), None))
    made((*hip.hipStreamSynchronize(stream), None))
assert (found == a @ b).all()
"""


@pytest.mark.extended
def test_arrays_and_streams_of_hip_python_are_taken(target: str, library: Path) -> None:  # noqa: F811
    env = {**os.environ, **environment(library, ",".join(ARCHS), emulator=False)}
    argv = [sys.executable, "-c", BORROWING, target]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_a_faulty_launch_loses_the_device_until_it_is_opened_again(
    library: Path,  # noqa: F811
    tmp_path: Path,
    kernel_cache: Path,
) -> None:
    a, b = operands(np.float16)
    variables = environment(library, TW_SIM_FAULT_LAUNCH="2")  # of each process that has the device
    with serving(tmp_path, kernel_cache, variables) as address, tw.connect(address) as client:
        check(client.gemm(a, b), a, b)
        with pytest.raises(tw.TilewrightError) as caught:
            client.gemm(a, b)
        assert caught.value.rule == "device_lost"
        assert "hipErrorLaunchFailure" in caught.value.message
        check(client.gemm(a, b), a, b)


WITHOUT = [
    ("gfx942", {"TW_SIM_DRIVER": "60200000"}, "ROCm 6.2", "install ROCm 6.3"),
    ("gfx906", {}, "gfx906 is not supported", "docs/adding-an-arch.md"),
    ("gfx942", {"HIP_VISIBLE_DEVICES": ""}, "hipErrorNoDevice", "/dev/kfd"),
]


@pytest.mark.parametrize(("arch", "more", "reason", "fix"), WITHOUT)
@pytest.mark.some(1)
@pytest.mark.extended
def test_who_asks_for_a_gpu_that_cannot_be_used_is_told_why(
    library: Path,  # noqa: F811
    tmp_path: Path, kernel_cache: Path, arch: str, more: dict[str, str], reason: str, fix: str
) -> None:  # fmt: skip
    a, b = operands(np.float32)
    variables = environment(library, arch, emulator=False, **more)
    with serving(tmp_path, kernel_cache, variables, device="") as address:
        with tw.connect(address) as client, pytest.raises(tw.NotFoundError) as caught:
            client.gemm(a, b, device="hip:0")
        assert reason in caught.value.message
        assert fix in caught.value.fix
        assert str(library) not in str(caught.value)
        argv = [sys.executable, "-m", "tilewright_tools.cli", "run", "gemm", "64", "64", "64", "--device", "hip:0"]
        ran = subprocess.run([*argv, "--target", address], capture_output=True, text=True, timeout=100)
        assert ran.returncode == 4
        said = " ".join(ran.stderr.split())  # lines are wrapped
        assert reason in said
        assert fix in said


@pytest.mark.parametrize(("arch", "more", "reason", "fix"), WITHOUT)
@pytest.mark.some(1)
@pytest.mark.extended
def test_server_that_is_to_have_a_gpu_does_not_start_without(
    library: Path,  # noqa: F811
    tmp_path: Path, arch: str, more: dict[str, str], reason: str, fix: str
) -> None:  # fmt: skip
    env = {**os.environ, **environment(library, arch, emulator=False, **more)}
    argv = [sys.executable, "-c", SERVE, "serve", "--listen", f"unix:{tmp_path}/s", "--device", "hip:0"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=100, env=env)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert reason in ran.stderr
    assert fix in ran.stderr
    assert not (tmp_path / "s").exists()
