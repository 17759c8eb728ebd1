"""What the CUDA device does on the host: no GPU, no driver."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilewright_kit.types.errors import (
    DeviceError,
    ResourceExhaustedError,
    ToolchainMissingError,
    UnavailableError,
)
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.devices.contract import DeviceLostError, IsolatedProvider
from tilewright_server.devices.cuda import provider
from tilewright_server.devices.cuda.discovery import Discovery, find, parse
from tilewright_server.devices.cuda.driver.driver import Driver
from tilewright_server.devices.cuda.driver.errors import LOST, RESULTS, UNUSABLE
from tilewright_server.devices.cuda.provider import CudaProvider
from tilewright_server.devices.gpu import discovery
from tilewright_server.devices.gpu import provider as gpu_provider
from tilewright_tools.cli.machine import doctor

H200: dict[str, Any] = {
    "ordinal": 0,
    "name": "NVIDIA H200",
    "uuid": "0123456789abcdef0123456789abcdef",
    "memory_bytes": 150_000_000_000,
    "clock_khz": 1_980_000,
    "units": 132,
    "integrated": 0,
    "compute_mode": 0,
    "pci_bus": 0x1B,
    "pci_device": 0,
    "memory_clock_khz": 3_201_000,
    "memory_bus_bits": 6144,
    "l2_bytes": 62_914_560,
    "pci_domain": 0,
    "major": 9,
    "minor": 0,
    "shared_bytes": 232_448,
    "virtual_memory": 1,
    "shareable_fds": 1,
    "memory_pools": 1,
}


def answer(*devices: dict[str, Any], driver: int = 13000) -> dict[str, Any]:
    return {"driver": driver, "devices": [{**device, "ordinal": place} for place, device in enumerate(devices)]}


# Finding devices


def test_devices_are_described_by_what_the_driver_says() -> None:
    found = parse(answer(H200, {**H200, "name": "NVIDIA A100", "major": 8, "units": 108, "shared_bytes": 166_912}))
    assert (found.driver, found.problem) == (13000, "")
    hopper, ampere = found.devices
    assert (hopper.id, hopper.kind, hopper.arch.name, hopper.units) == ("cuda:0", "cuda", "sm_90a", 132)
    assert hopper.attributes["uuid"] == "GPU-01234567-89ab-cdef-0123-456789abcdef"
    assert hopper.attributes["pci"] == "00000000:1b:00.0"
    assert hopper.arch.throughput.memory_bytes_per_second == pytest.approx(4.917e12, rel=0.01)
    assert (ampere.id, ampere.arch.name, ampere.arch.throughput.units, ampere.arch.lds_bytes) == (
        "cuda:1", "sm_80", 108, 166_912,
    )  # fmt: skip
    json.dumps(dict(hopper.attributes))  # they travel to the device's own process


def test_device_that_differs_from_its_archs_figures_is_noted_and_taken_as_it_is() -> None:
    found = parse(answer({**H200, "units": 114, "shared_bytes": 100_000, "compute_mode": 2}))
    assert found.devices[0].arch.throughput.units == 114
    assert found.devices[0].arch.throughput.clock_mhz == 1980
    assert found.devices[0].arch.lds_bytes == 100_000
    assert len(found.notes) == 3
    assert "114 SMs" in found.notes[0]


def test_device_that_is_too_old_is_left_out_with_a_note() -> None:
    found = parse(answer({**H200, "name": "Tesla V100", "major": 7}, H200))
    assert [info.id for info in found.devices] == ["cuda:1"]
    assert "Tesla V100" in found.left_out["cuda:0"].reason
    alone = parse(answer({**H200, "major": 7}))
    assert alone.devices == ()
    assert alone.problem
    assert alone.fix


@pytest.mark.parametrize(
    ("record", "text", "fix"),
    [
        ({"error": "library", "reason": "no file"}, "libcuda.so.1", "580"),
        ({"error": "old", "reason": "cuDeviceGetUuid_v2"}, "too old", "580"),
        ({"error": "driver", "reason": "CUDA_ERROR_NO_DEVICE"}, "CUDA_ERROR_NO_DEVICE", "--gpus all"),
        (answer(H200, driver=12080), "CUDA 12.8", "580"),
        (answer(), "no device", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_every_reason_for_having_no_device_says_what_to_do(record: dict[str, Any], text: str, fix: str) -> None:
    found = parse(record, node=False)
    assert found.devices == ()
    assert text in found.problem
    assert fix in found.fix


def test_machine_without_a_driver_is_not_asked(tmp_path: Path) -> None:
    found = find(root=tmp_path, command=("/nonexistent",))
    assert found.devices == ()
    assert "no NVIDIA driver" in found.problem
    assert "580" in found.fix


def test_answers_that_are_none_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    strange = [("echo", text) for text in ("nonsense", "[]", "{}", "1", '{"driver": 13000, "devices": [{}]}')]
    for command in (("/nonexistent",), ("false",), *strange):
        found = find(root=tmp_path, command=command)
        assert found.devices == ()
        assert "failed" in found.problem
    monkeypatch.setattr(discovery, "_TIMEOUT_S", 0.2)
    assert "did not answer" in find(root=tmp_path, command=("sleep", "30")).problem
    monkeypatch.setattr(discovery, "_ends", lambda process: process.wait() is None)  # one that no signal reaches
    begin = time.monotonic()
    assert "did not answer" in find(root=tmp_path, command=("sleep", "30")).problem
    assert time.monotonic() - begin < 20  # not the 30 s of the command
    monkeypatch.setattr(discovery, "_TIMEOUT_S", 10.0)
    good = find(root=tmp_path, command=("echo", json.dumps(answer(H200))))
    assert [info.id for info in good.devices] == ["cuda:0"]


ALONE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "nvidia"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
from tilewright_server.devices.cuda import discovery, plugin
from tilewright_server.devices.cuda import device
from tilewright_server.devices.cuda.driver import api, module
from tilewright_kit.types.errors import ToolchainMissingError, UnavailableError
discovery._LIBRARIES = discovery._NODES = ()
(provider,) = plugin.tilewright_devices()
assert provider.discover() == ()
assert "580" in provider.diagnose()["devices"]
info = discovery.parse({"driver": 13000, "devices": [RECORD]}).devices[0]
try:
    provider.open(info)
except UnavailableError as error:
    assert "tilewright[cuda]" in error.fix
else:
    raise SystemExit("opened")
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain
try:
    NvrtcToolchain([]).identity()
except ToolchainMissingError as error:
    assert "tilewright[cuda]" in error.fix
else:
    raise SystemExit("found")
print("fine")
"""


def run_python(script: str) -> str:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_plugin_loads_without_any_package_of_nvidias() -> None:
    assert run_python(ALONE.replace("RECORD", repr(H200))) == "fine\n"


def test_finding_devices_loads_no_driver_into_this_process() -> None:
    script = """
import sys
from tilewright_kit.loading.loader import PluginManager
manager = PluginManager()
manager.load_entry_points()
assert "cuda" in manager.devices
manager.devices["cuda"].discover()
assert not [name for name in sys.modules if name == "cuda" or name.startswith("cuda.")]
assert "libcuda" not in open("/proc/self/maps").read()
print("fine")
"""
    assert run_python(script) == "fine\n"


def test_devices_are_opened_in_processes_of_their_own() -> None:
    cuda = CudaProvider()
    assert isinstance(cuda, IsolatedProvider)
    spec = cuda.worker(parse(answer(H200)).devices[0])
    assert spec is not None
    module, _, function = spec.factory.partition(":")
    assert getattr(sys.modules[module], function) is provider.open_device


# What doctor says


def diagnosed(monkeypatch: pytest.MonkeyPatch, found: Discovery) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(provider, "find", lambda kind: found)
    return {item.topic: item for item in doctor.examine()}


def test_doctor_says_what_is_missing_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: False)
    monkeypatch.setattr("tilewright_server.build.toolchains.nvrtc.have_module", lambda name: False)
    found = diagnosed(monkeypatch, parse(answer(H200, driver=12080)))
    assert found["cuda driver"].detail == "CUDA 12.8"
    assert "580" in found["cuda devices"].fix
    assert found["cuda packages"].fix == "pip install 'tilewright[cuda]'"
    assert found["cuda compiler"].fix == "pip install 'tilewright[cuda]'"
    assert {found[f"cuda {topic}"].state for topic in ("devices", "packages", "compiler")} == {"note"}


def test_gpus_that_cannot_be_used_for_want_of_packages_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "find", lambda kind: parse(answer(H200)))
    assert [info.id for info in CudaProvider().discover()] == ["cuda:0"]
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: name != "cuda-bindings")
    assert CudaProvider().discover() == ()
    said = CudaProvider().diagnose()
    assert "1 found" in said["devices"]
    assert "cuda-bindings not installed" in said["packages"]
    assert "tilewright[cuda]" in said["packages"]


def test_doctor_lists_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosed(monkeypatch, parse(answer({**H200, "units": 114})))
    assert found["cuda driver"].state == "ok"
    assert "114 SMs" in found["cuda note 1"].detail
    assert found["cuda note 1"].state == "note"
    assert "cuda devices" not in found


@pytest.mark.extended
def test_without_a_compiler_for_the_cpu_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: object) -> str:
        raise ToolchainMissingError("no C++ compiler was found", fix="pip install ziglang")

    monkeypatch.setattr(CpuToolchain, "describe", nothing)
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: True)
    monkeypatch.setattr(gpu_provider, "version", lambda name: "13")
    found = diagnosed(monkeypatch, parse(answer(H200)))["compiler"]
    assert (found.state, found.fix) == ("note", "pip install ziglang")
    assert "no C++ compiler was found" in found.detail
    assert diagnosed(monkeypatch, parse(answer(H200, driver=12080)))["compiler"].state == "missing"


# Errors


def test_results_become_typed_errors() -> None:
    full = RESULTS.error_of("CUDA_ERROR_OUT_OF_MEMORY")
    assert isinstance(full, ResourceExhaustedError)
    assert full.retry_after_s, "others may free memory meanwhile"
    for name in LOST:
        error = RESULTS.error_of(name, "cuda:0")
        assert isinstance(error, DeviceLostError)
        assert name in str(error)
        assert error.retry_after_s
    for name in UNUSABLE:
        assert isinstance(RESULTS.error_of(name, "cuda:0"), UnavailableError)
    refused = RESULTS.error_of("CUDA_ERROR_INVALID_VALUE", "cuda:0", "a launch")
    assert type(refused) is DeviceError
    assert refused.value == "CUDA_ERROR_INVALID_VALUE"
    assert "a launch" in str(refused)


def test_names_of_results_are_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    names = set(driver.CUresult.__members__)
    assert names >= LOST
    assert UNUSABLE - names <= {"CUDA_ERROR_INSUFFICIENT_DRIVER"}  # the runtime's


# Sticky results


class Answers:
    """A driver of which only some calls matter."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=SimpleNamespace(value=0))

    def __init__(self, broken: bool) -> None:
        self.broken = broken
        self.destroyed = 0

    def cuEventCreate(self, flags: int) -> tuple[Any, Any]:
        return (Result("CUDA_ERROR_UNKNOWN"), None) if self.broken else (0, "event")

    def cuEventDestroy(self, event: str) -> tuple[int]:
        self.destroyed += 1
        return (0,)


class Result:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize("broken", [True, False])
def test_unknown_result_ends_the_device_only_if_nothing_works_any_more(broken: bool) -> None:
    api = Answers(broken)
    driver = Driver(api, "cuda:0")
    driver.bind("context")
    with pytest.raises(UnavailableError if broken else DeviceError):
        driver.check((Result("CUDA_ERROR_UNKNOWN"),))
    assert (driver.lost is not None) is broken
    assert api.destroyed == (not broken)


def test_everything_is_refused_after_the_first_sticky_result() -> None:
    driver = Driver(Answers(False), "cuda:0")
    assert not driver.quietly((Result("CUDA_ERROR_ILLEGAL_ADDRESS"),))
    assert not driver.quietly((Result("CUDA_ERROR_LAUNCH_FAILED"),))
    with pytest.raises(DeviceLostError, match="ILLEGAL_ADDRESS"):
        driver.enter()
