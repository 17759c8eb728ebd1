"""Machines that are not as expected: runtimes that lack functions, chips of several kinds or without kernels in one
machine, one that says nothing of itself, code objects of a later version. All is found before the first launch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hip_device_cases import UNIT
from hip_service import check, operands, serving
from simulated_hip import HERE, build, environment, library, marks  # noqa: F401
from test_hip_simulated import found_by_the_server

import tilewright as tw
from tilewright_arch import from_gcn_arch_name
from tilewright_kit.types.errors import DeviceError
from tilewright_server.devices import hip
from tilewright_server.devices.hip import discovery
from tilewright_server.devices.hip.driver import settings
from tilewright_server.devices.hip.driver.functions import OPTIONAL, REQUIRED, lacking
from tilewright_server.devices.hip.driver.module import NEWEST_VERSION, check_code_object
from tilewright_server.devices.hip.provider import HipProvider

ROOT = Path(__file__).parents[3]
ALL = {name for group in OPTIONAL.values() for name in group} | set(REQUIRED)


def without(folder: Path, *names: str) -> Path:
    """A runtime that does not export some functions."""
    script = folder / "hidden.map"
    script.write_text("{ local: " + "; ".join(names) + "; };")
    return build(folder, f"-Wl,--version-script={script}")


def test_every_function_that_is_called_is_looked_up_before() -> None:
    """Those of Python by what its modules say, those of libtilewright by its own table."""
    package = pytest.importorskip("hip", reason="hip-python is not installed")
    called: set[str] = set()
    for path in Path(str(hip.__file__)).parent.rglob("*.py"):
        called |= set(re.findall(r"raw\.(hip[A-Z]\w+)", path.read_text("utf-8")))
    functions = {name for name in called if type(getattr(package.hip, name)).__name__.endswith("function_or_method")}
    assert len(functions) > 50
    native = (ROOT / "native/runtime/devices/hip.cpp").read_text("utf-8")
    table = set(re.findall(r"X\((hip\w+),", native)) | set(re.findall(r'"(hip\w+)"', native))
    assert "hipModuleLaunchKernel" in table
    exported = {"hipGetDeviceProperties": "hipGetDevicePropertiesR0600"}
    assert {exported.get(name, name) for name in functions} | table <= ALL
    assert len(ALL) == len(REQUIRED) + sum(map(len, OPTIONAL.values())), "each stands once"


def test_nothing_lacks_where_no_runtime_is_loaded(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 1 /usr/lib/libc.so.6\n")
    assert lacking(maps) == ()
    maps.write_text(f"7f00-7f01 r-xp 00000000 00:00 1 {tmp_path}/libamdhip64.so.7 (deleted)\n")
    assert lacking(maps) == ()


OPEN = """
import json, os, sys
from pathlib import Path
from tilewright_server.devices.hip import discovery
discovery._LIBRARIES = (os.environ["TW_SIMULATED_HIP"],)
from tilewright_arch import load
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.devices.hip.driver.driver import Driver
from tilewright_server.devices.hip.provider import HipProvider, open_device
if sys.argv[1] == "driver":
    try:
        Driver.open(load("gfx942"))
    except TilewrightError as error:
        print(json.dumps([error.rule, error.reason, error.fix]))
    sys.exit()
device = open_device(HipProvider().discover()[0], {})
answers = []
file = os.eventfd(0)
for kind in ("hip_pool", "fd", "hip_ipc"):
    try:
        name = b"" if kind == "fd" else bytes(64)
        device.import_memory(MemoryHandle(kind, name, 4096, -1 if kind == "hip_ipc" else file))
    except TilewrightError as error:
        answers.append([kind, error.rule])
device.free(device.allocate(4096))
print(json.dumps(answers))
"""


def opened(folder: Path, what: str) -> Any:
    env = {**os.environ, **environment(folder, emulator=False)}
    done = subprocess.run([sys.executable, "-c", OPEN, what], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class TestRuntimes:
    pytestmark = marks

    @pytest.mark.parametrize("name", REQUIRED[2::9])
    @pytest.mark.some(1)
    def test_a_runtime_without_a_function_is_refused_by_its_name(self, name: str, tmp_path: Path) -> None:
        devices, problem, fix, _ = found_by_the_server(without(tmp_path, name))
        assert devices == {}
        assert f"the runtime (ROCm 7.15) has no {name}" in problem
        assert "ROCm 6.3 or later" in fix

    def test_lacking_functions_are_told_when_a_device_is_opened(self, tmp_path: Path) -> None:
        rule, reason, fix = opened(without(tmp_path, "hipModuleLaunchKernel"), "driver")
        assert rule == "device_driver"
        assert reason == "the runtime has no hipModuleLaunchKernel"
        assert "install ROCm" in fix

    def test_what_a_runtime_can_spare_is_noted_and_refused_with_a_type(self, tmp_path: Path) -> None:
        names = ("hipMemPoolImportPointer", "hipMemPoolImportFromShareableHandle", "hipMemImportFromShareableHandle",
                 "hipStreamWaitValue64")  # fmt: skip
        folder = without(tmp_path, *names)
        devices, problem, _, notes = found_by_the_server(folder)
        assert (devices, problem) == ({"hip:0": "gfx942"}, "")
        told = "\n".join(notes)
        assert all(name in told for name in names)
        assert "handles and descriptors can" in told
        assert "interprocess events or the host do" in told
        assert dict(opened(folder, "memory"))["hip_pool"] == "memory_kind"
        assert dict(opened(folder, "memory"))["fd"] == "memory_kind"

    def test_a_device_that_says_nothing_does_not_take_others_with_it(self, library: Path) -> None:  # noqa: F811
        devices, problem, _, notes = found_by_the_server(library, "gfx942,gfx1100", TW_SIM_FAULT_DEVICE="1")
        assert (devices, problem) == ({"hip:1": "gfx1100"}, "")
        (note,) = notes
        assert "hipErrorUnknown" in note
        assert "ROCR_VISIBLE_DEVICES" in note

    def test_visible_devices_have_numbers_of_their_own(self, library: Path) -> None:  # noqa: F811
        shown, *_ = found_by_the_server(library, "gfx90a,gfx942,gfx1100", HIP_VISIBLE_DEVICES="2,1")
        assert shown == {"hip:0": "gfx1100", "hip:1": "gfx942"}


def record(*chips: str) -> dict[str, Any]:
    common = {
        "memory_bytes": 1 << 34, "clock_khz": 2_100_000, "units": 304, "compute_units": 304, "pci_domain": 0,
        "pci_bus": 1, "pci_device": 0, "memory_clock_khz": 1_300_000, "memory_bus_bits": 8192, "l2_bytes": 4 << 20,
        "shared_bytes": 65536, "wave": 64, "virtual_memory": 1, "memory_pools": 1,
    }  # fmt: skip
    devices = [
        {"ordinal": i, "name": f"GPU {i}", "gcn_arch_name": chip, "uuid": f"GPU-{i}", **common}
        for i, chip in enumerate(chips)
    ]
    return {"driver": 70_200_000, "devices": devices}


def topology(root: Path, *versions: int) -> Path:
    for node, version in enumerate(versions):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    return root


def test_a_chip_that_gives_itself_for_another_is_noted(tmp_path: Path) -> None:
    root = topology(tmp_path, 0, 110003)
    found = discovery.parse(record("gfx1100"), root=root)
    assert [info.id for info in found.devices] == ["hip:0"]
    assert any("HSA_OVERRIDE_GFX_VERSION" in note and "gfx1103" in note for note in found.notes)
    honest = discovery.parse(record("gfx942:sramecc+:xnack-"), root=topology(tmp_path / "b", 90402))
    assert not any("HSA_OVERRIDE" in note for note in honest.notes)


def test_an_integrated_gpu_beside_is_left_out_with_what_to_do(tmp_path: Path) -> None:
    found = discovery.parse(record("gfx1036", "gfx942", "gfx1100"), root=tmp_path)
    assert [(info.id, info.arch.name) for info in found.devices] == [("hip:1", "gfx942"), ("hip:2", "gfx1100")]
    left = found.left_out["hip:0"]
    assert "gfx1036 is not supported" in left.reason
    assert "ROCR_VISIBLE_DEVICES" in left.fix


@pytest.mark.parametrize(
    ("environ", "entries"),
    [
        ({}, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "5,6", "HIP_VISIBLE_DEVICES": ""}, ["5", "6"]),
        ({"HIP_VISIBLE_DEVICES": "GPU-a1,GPU-b2"}, ["GPU-a1", "GPU-b2"]),
    ],
)
def test_a_worker_sees_its_own_device_as_the_first(environ: dict[str, str], entries: list[str]) -> None:
    assert [settings.visible_entry(ordinal, environ) for ordinal in range(2)] == entries


def test_workers_are_told_which_device_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VISIBLE, "4,2,7")
    found = discovery.parse(record("gfx1036", "gfx942", "gfx1100"), root=tmp_path)
    assert [HipProvider().worker(info).options["visible"] for info in found.devices] == ["2", "7"]


def test_a_code_object_of_a_later_version_is_refused(build_code: bytes) -> None:
    arch = from_gcn_arch_name("gfx942")
    assert check_code_object(build_code, arch, "gfx942").version <= NEWEST_VERSION
    later = bytearray(build_code)
    later[8] = NEWEST_VERSION + 1 - 2
    with pytest.raises(DeviceError, match="version 7 of the code object") as caught:
        check_code_object(bytes(later), arch, "gfx942")
    assert caught.value.rule == "module_load"
    assert "-mcode-object-version=6" in caught.value.fix


@pytest.fixture
def build_code(build: Any) -> bytes:
    data: bytes = build(UNIT, from_gcn_arch_name("gfx942")).read_bytes()
    return data


POOLS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tilewright_server.devices.hip import discovery
discovery._LIBRARIES = (os.environ["TW_SIMULATED_HIP"],)
import numpy as np
from gpu_device_harness import Client, N, get
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.hip.provider import HipProvider
from tilewright_server.devices.worker.device import WorkerDevice

if __name__ == "__main__":
    provider = HipProvider()
    found = []
    for info in provider.discover():
        device = WorkerDevice(info, provider.worker(info))
        for owner in (info.attributes["ordinal"], 1 - info.attributes["ordinal"]):
            client = Client("hip", Path(os.devnull), owner)
            for way in ("pool", "ipc", "fd"):
                handle = client.handle(way)
                client.ask("put", offset=0, values=[3.0 + owner] * N)
                try:
                    buffer = device.import_memory(handle)
                    found.append([info.id, owner, way, bool((get(device, buffer) == 3 + owner).all())])
                    device.release_memory(buffer)
                except TilewrightError as error:
                    found.append([info.id, owner, way, error.rule])
            client.close()
        device.close()
    print(json.dumps(found))
"""


class TestServers:
    pytestmark = marks

    @pytest.mark.parametrize("quirks", ["", "pool_first", "pool_first,current"])
    @pytest.mark.extended
    def test_workers_map_pools_of_their_own_gpu_whatever_its_number(
        self,
        library: Path,  # noqa: F811
        quirks: str,
        tmp_path: Path,
    ) -> None:
        script = tmp_path / "pools.py"
        script.write_text(POOLS)
        env = {**os.environ, **environment(library, "gfx942,gfx942", emulator=False, TW_SIM_QUIRKS=quirks)}
        argv = [sys.executable, str(script), str(HERE)]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=100)
        assert done.returncode == 0, done.stderr[-3000:]
        found = {(device, owner, way): answer for device, owner, way, answer in json.loads(done.stdout)}
        for place in range(2):
            for way in ("pool", "ipc", "fd"):
                assert found[f"hip:{place}", place, way] is True, found
            if "current" not in quirks:  # else the runtime does not tell, which docs/devices.md says
                assert found[f"hip:{place}", 1 - place, "ipc"] == "memory_device", found
                assert found[f"hip:{place}", 1 - place, "fd"] == "memory_device", found

    @pytest.mark.extended
    def test_one_server_serves_chips_of_two_kinds_beside_one_without_kernels(
        self,
        library: Path,  # noqa: F811
        tmp_path: Path,
        kernel_cache: Path,
    ) -> None:
        a, b = operands("float16")
        variables = environment(library, "gfx1036,gfx942,gfx1100")
        with serving(tmp_path, kernel_cache, variables, device="") as address, tw.connect(address) as client:
            shown = {device.id: device.arch for device in client.session.devices if device.kind == "hip"}
            assert shown == {"hip:1": "gfx942", "hip:2": "gfx1100"}
            for device in ("hip:1", "hip:2"):
                check(client.gemm(a, b, device=device), a, b)
                assert client.report.device == device
            check(client.gemm(a, b), a, b)
            assert client.report.device == "hip:1", "the first that has kernels is the default"
            with pytest.raises(tw.NotFoundError) as caught:
                client.gemm(a, b, device="hip:0")
            assert "is not supported" in caught.value.message
            assert "hip:1" in caught.value.fix
