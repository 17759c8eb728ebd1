"""What the HIP device does on the host: no GPU, no runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tilewright_arch
from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError, UnavailableError
from tilewright_server.devices.contract import DeviceLostError, IsolatedProvider
from tilewright_server.devices.gpu import provider as gpu_provider
from tilewright_server.devices.hip import discovery, provider
from tilewright_server.devices.hip.discovery import Discovery, find, parse, seen_by_kernel
from tilewright_server.devices.hip.driver import driver
from tilewright_server.devices.hip.driver.driver import MIN_DRIVER, Driver, load_api, version_text
from tilewright_server.devices.hip.driver.errors import LOST, RESULTS, UNUSABLE
from tilewright_server.devices.hip.identity import describe_pci, describe_uuid
from tilewright_server.devices.hip.provider import HipProvider
from tilewright_tools.cli.machine import doctor

MI300X: dict[str, Any] = {
    "ordinal": 0,
    "name": "AMD Instinct MI300X",
    "gcn_arch_name": "gfx942:sramecc+:xnack-",
    "uuid": "GPU-1a2b3c4d5e6f7081",
    "memory_bytes": 205_822_885_888,
    "clock_khz": 2_100_000,
    "units": 304,
    "compute_units": 304,
    "pci_domain": 0,
    "pci_bus": 0x63,
    "pci_device": 0,
    "memory_clock_khz": 1_300_000,
    "memory_bus_bits": 8192,
    "l2_bytes": 4 << 20,
    "shared_bytes": 65_536,
    "wave": 64,
    "virtual_memory": 1,
    "memory_pools": 1,
}
RADEON = {
    **MI300X,
    "name": "AMD Radeon RX 7900 XTX",
    "gcn_arch_name": "gfx1100",
    "units": 48,
    "compute_units": 96,
    "clock_khz": 2_482_000,
    "wave": 32,
}


def answer(*devices: dict[str, Any], driver: int = 70_226_015) -> dict[str, Any]:
    return {"driver": driver, "devices": [{**device, "ordinal": place} for place, device in enumerate(devices)]}


# Finding devices


def test_devices_are_described_by_what_the_runtime_says() -> None:
    found = parse(answer(MI300X, RADEON))
    assert (found.driver, found.problem, found.notes) == (70_226_015, "", ())
    instinct, radeon = found.devices
    assert (instinct.id, instinct.kind, instinct.arch.name, instinct.units) == ("hip:0", "hip", "gfx942", 304)
    assert instinct.attributes["uuid"] == "GPU-1a2b3c4d5e6f7081"
    assert instinct.attributes["gcn_arch_name"] == "gfx942:sramecc+:xnack-"
    assert instinct.attributes["pci"] == "00000000:63:00.0"
    assert instinct.arch.throughput.memory_bytes_per_second == 5_300_000_000_000
    assert (radeon.id, radeon.arch.name, radeon.units, radeon.arch.wave_size) == ("hip:1", "gfx1100", 96, 32)
    json.dumps(dict(instinct.attributes))  # they travel to the device's own process


def test_units_that_the_runtime_counts_in_pairs_are_compute_units() -> None:
    (smaller,) = parse(answer({**RADEON, "units": 42, "compute_units": 84})).devices
    assert smaller.units == 84
    (older,) = parse(answer({**RADEON, "compute_units": 0})).devices  # a runtime that does not know the attribute
    assert older.units == 48


def test_device_that_differs_from_its_archs_figures_is_noted_and_taken_as_it_is() -> None:
    found = parse(answer({**MI300X, "units": 228, "compute_units": 228, "shared_bytes": 32_768, "virtual_memory": 0}))
    arch = found.devices[0].arch
    assert (arch.throughput.units, arch.throughput.clock_mhz, arch.lds_bytes) == (228, 2100, 32_768)
    assert len(found.notes) == 3
    assert "228 compute units" in found.notes[0]
    assert "descriptors" in found.notes[2]
    assert "no memory pools" in parse(answer({**MI300X, "memory_pools": 0})).notes[0]


def test_chips_that_run_an_archs_sources_are_compiled_for() -> None:
    for name, family in (("gfx1101", "gfx1100"), ("gfx1102", "gfx1100"), ("gfx1200", "gfx1201")):
        (info,) = parse(answer({**RADEON, "gcn_arch_name": name, "units": 16, "compute_units": 32})).devices
        assert (info.arch.name, info.arch.toolchain.gpu_arch, info.units) == (family, name, 32)
        assert info.arch.throughput.memory_bytes_per_second > 0


@pytest.mark.parametrize("name", ["gfx906:sramecc+:xnack-", "gfx1030", "gfx9", "", "sm_90"])
def test_device_of_an_unknown_arch_is_left_out_with_a_note(name: str) -> None:
    found = parse(answer({**MI300X, "name": "Radeon VII", "gcn_arch_name": name}, MI300X))
    assert [info.id for info in found.devices] == ["hip:1"]
    assert found.notes == ()
    (why,) = found.left_out.values()
    assert "Radeon VII" in why.reason
    assert "gfx942" in why.reason
    assert "did you mean" not in why.reason
    assert "docs/adding-an-arch.md" in why.fix
    assert set(found.left_out) == {"hip:0"}
    alone = parse(answer({**MI300X, "gcn_arch_name": name}))
    assert alone.devices == ()
    assert alone.problem
    assert alone.fix


@pytest.mark.parametrize(
    ("record", "text", "fix"),
    [
        ({"error": "package", "reason": "the package hip-python is not installed"}, "hip-python", "tilewright[hip]"),
        ({"error": "library", "reason": "failed to dlopen"}, "libamdhip64.so", "install ROCm"),
        ({"error": "old", "reason": "no symbol hipFoo"}, "too old: it has no hipFoo", "install ROCm"),
        ({"error": "old", "reason": "/opt/rocm/libamdhip64.so"}, "too old: it lacks functions", "install ROCm"),
        ({"error": "driver", "reason": "hipErrorNoDevice"}, "hipErrorNoDevice", "--device /dev/kfd"),
        (answer(MI300X, driver=50_700_000), "ROCm 5.7", "install ROCm"),
        (answer(), "no device", "HIP_VISIBLE_DEVICES"),
    ],
)
def test_every_reason_for_having_no_device_says_what_to_do(
    record: dict[str, Any], text: str, fix: str, tmp_path: Path
) -> None:
    found = parse(record, root=tmp_path)
    assert found.devices == ()
    assert text in found.problem
    assert fix in found.fix


def test_missing_permission_on_the_driver_is_told_from_a_missing_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"error": "driver", "reason": "hipErrorNoDevice"}
    (tmp_path / "dev").mkdir()
    node = tmp_path / "dev/kfd"
    node.touch()
    assert "amd-smi" in parse(refused, root=tmp_path).fix
    monkeypatch.setattr(os, "access", lambda path, mode: path != node)  # root may do everything
    fix = parse(refused, root=tmp_path).fix
    assert "no permission on /dev/kfd" in fix
    assert "render" in fix
    assert "--group-add" in fix


def test_gpus_that_the_kernel_shows_are_named_even_without_the_runtime(tmp_path: Path) -> None:
    for number, version in enumerate((0, 90_402, 90_010, 110_000)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count 8\ngfx_target_version {version}\n")
    (folder / "properties").with_name("name").write_text("ip discovery\n")
    broken = tmp_path / "sys/class/kfd/kfd/topology/nodes/9/properties"
    broken.parent.mkdir()
    broken.write_text("gfx_target_version many\n")
    assert seen_by_kernel(tmp_path) == ("gfx942", "gfx90a", "gfx1100")
    assert "shows gfx942, gfx90a, gfx1100" in parse({"error": "library"}, root=tmp_path).problem


def test_machine_without_a_driver_is_not_asked(tmp_path: Path) -> None:
    found = find(root=tmp_path, command=("/nonexistent",))
    assert found.devices == ()
    assert "no AMD driver" in found.problem
    assert "ROCm 6.3" in found.fix


def test_answers_that_are_none_are_survived(tmp_path: Path) -> None:
    (tmp_path / "opt/rocm/lib").mkdir(parents=True)
    (tmp_path / "opt/rocm/lib/libamdhip64.so").touch()
    strange = [("echo", text) for text in ("nonsense", "[]", "{}", '{"driver": 70000000, "devices": [{}]}')]
    for command in (("/nonexistent",), ("false",), *strange):
        found = find(root=tmp_path, command=command)
        assert found.devices == ()
        assert "asking the AMD driver failed" in found.problem
    good = find(root=tmp_path, command=("echo", json.dumps(answer(MI300X))))
    assert [info.id for info in good.devices] == ["hip:0"]


def test_probe_says_what_is_missing() -> None:
    pytest.importorskip("hip", reason="hip-python is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "tilewright_server.devices.hip.probe"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ROCM_PATH": "/nonexistent", "LD_LIBRARY_PATH": ""},
    )
    record = json.loads(ran.stdout)
    if "devices" in record:
        pytest.skip("this machine has ROCm")
    assert record["error"] in ("library", "driver")
    assert parse(record).fix


def test_identity_is_the_uuid_where_the_board_has_one() -> None:
    pci = describe_pci(0, 0x63, 0)
    assert describe_uuid(b"1a2b3c4d5e6f7081", pci) == "GPU-1a2b3c4d5e6f7081"
    for unset in (bytes(16), b"XX" + bytes(14), b"", b"zzzzzzzzzzzzzzzz"):
        assert describe_uuid(unset, pci) == "PCI-00000000:63:00.0"


def test_versions_are_told_as_rocm_counts_them() -> None:
    assert version_text(70_226_015) == "ROCm 7.2"
    assert version_text(MIN_DRIVER) == "ROCm 6.3"


# The plugin


ALONE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hip", "rocm"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
from tilewright_server.devices.hip import device, discovery, plugin, probe
from tilewright_server.devices.hip.driver import api
from tilewright_kit.types.errors import UnavailableError
discovery._LIBRARIES, discovery._NODE = (), "nowhere"
(provider,) = plugin.tilewright_devices()
assert provider.discover() == ()
assert "ROCm" in provider.diagnose()["devices"]
info = discovery.parse({"driver": 70000000, "devices": [RECORD]}).devices[0]
try:
    provider.open(info)
except UnavailableError as error:
    assert "tilewright[hip]" in error.fix
else:
    raise SystemExit("opened")
print("fine")
"""


def test_plugin_loads_without_any_package_of_amds() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ALONE.replace("RECORD", repr(MI300X))], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr


FIND = """
from pathlib import Path
from tilewright_kit.loading.loader import PluginManager
manager = PluginManager()
manager.load_entry_points()
assert "hip" in manager.devices
manager.devices["hip"].discover()
assert "libamdhip64" not in Path("/proc/self/maps").read_text()
"""


def test_finding_devices_loads_no_driver_into_the_process() -> None:
    """In a process of its own: other tests load a simulated driver into this one."""
    ran = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_devices_are_opened_in_processes_of_their_own() -> None:
    hip = HipProvider()
    assert isinstance(hip, IsolatedProvider)
    spec = hip.worker(parse(answer(MI300X)).devices[0])
    assert spec is not None
    module, _, function = spec.factory.partition(":")
    assert getattr(sys.modules[module], function) is provider.open_device


def test_package_that_holds_the_interpreters_lock_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "find", lambda kind: parse(answer(MI300X)))
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: True)
    monkeypatch.setattr(gpu_provider, "version", lambda name: "7.2.2.562.43")
    assert HipProvider().discover() == ()
    said = HipProvider().diagnose()
    assert "1 found, none can be used" in said["devices"]
    assert "7.2.2.562.43 is too old, 10 is the first" in said["packages"]
    assert said["packages"].endswith("pip install 'tilewright[hip]' --upgrade")
    pytest.importorskip("hip", reason="hip-python is not installed")
    monkeypatch.setattr(driver, "version", lambda name: "7.2.2.562.43")
    with pytest.raises(UnavailableError) as caught:
        load_api()
    assert "--upgrade" in caught.value.fix


def test_versions_of_packages_are_read_whatever_follows_the_first_number() -> None:
    assert [gpu_provider.major_version(text) for text in ("10.0.0.0.1.2", "10rc1", "7", "", "local")] == [
        10,
        10,
        7,
        0,
        0,
    ]


def diagnosed(monkeypatch: pytest.MonkeyPatch, found: Discovery) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(provider, "find", lambda kind: found)
    return {item.topic: item for item in doctor.examine()}


@pytest.mark.extended
def test_doctor_lists_gpus_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: True)
    monkeypatch.setattr(gpu_provider, "version", lambda name: "13.0")
    found = diagnosed(monkeypatch, parse(answer({**MI300X, "units": 228, "compute_units": 228})))
    assert found["hip driver"].detail == "ROCm 7.2"
    assert "228 compute units" in found["hip note 1"].detail
    assert found["hip note 1"].state == "note"
    assert "hip devices" not in found
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: False)
    found = diagnosed(monkeypatch, parse({"error": "library"}))
    assert "install ROCm" in found["hip devices"].fix
    assert found["hip packages"].fix == "pip install 'tilewright[hip]'"


# Results


def test_results_become_typed_errors() -> None:
    full = RESULTS.error_of("hipErrorOutOfMemory")
    assert isinstance(full, ResourceExhaustedError)
    assert full.retry_after_s, "others may free memory meanwhile"
    for name in LOST:
        error = RESULTS.error_of(name, "hip:0")
        assert isinstance(error, DeviceLostError)
        assert name in str(error)
    for name in UNUSABLE:
        assert isinstance(RESULTS.error_of(name, "hip:0"), UnavailableError)
    refused = RESULTS.error_of("hipErrorInvalidValue", "hip:0", "a launch")
    assert (type(refused), refused.value) == (DeviceError, "hipErrorInvalidValue")
    assert {"hipErrorIllegalAddress", "hipErrorLaunchFailure", "hipErrorECCNotCorrectable"} <= LOST


def test_names_of_results_are_the_runtimes() -> None:
    package = pytest.importorskip("hip", reason="hip-python is not installed")
    names = set(package.hip.hipError_t.__members__)
    special = {RESULTS.full, RESULTS.busy, RESULTS.unknown, RESULTS.missing}
    assert names >= LOST | UNUSABLE | special | set(RESULTS.imports) | set(RESULTS.reasons)


def test_runtime_that_cannot_be_loaded_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(flags: int) -> tuple[int]:
        raise RuntimeError("failed to dlopen /opt/rocm/lib/libamdhip64.so")

    monkeypatch.setattr(driver, "load_api", lambda: SimpleNamespace(hipInit=fails))
    with pytest.raises(UnavailableError) as caught:
        Driver.open(tilewright_arch.load("gfx942"))
    assert "install ROCm" in caught.value.fix
    assert "/opt" not in str(caught.value)
    old = SimpleNamespace(hipInit=lambda flags: (0,), hipRuntimeGetVersion=lambda: (0, 60_000_000))
    monkeypatch.setattr(driver, "load_api", lambda: old)
    with pytest.raises(UnavailableError, match=r"ROCm 6\.0"):
        Driver.open(tilewright_arch.load("gfx942"))


def test_library_names_are_looked_for_where_rocm_puts_them(tmp_path: Path) -> None:
    assert not discovery.has_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert discovery.has_driver(tmp_path)
