"""Who names a device that is not there is told why, and what to do: what `doctor` would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright_arch import load
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import NotFoundError
from tilewright_server.devices.contract import DeviceHost, ExplainingProvider
from tilewright_server.devices.cuda import discovery as cuda_discovery
from tilewright_server.devices.cuda import provider as cuda
from tilewright_server.devices.gpu import provider as gpu_provider
from tilewright_server.devices.gpu.discovery import Discovery
from tilewright_server.devices.gpu.provider import GpuProvider
from tilewright_server.devices.hip import discovery as hip_discovery
from tilewright_server.devices.hip import provider as hip
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_tools.cli.machine import doctor

KINDS = {"hip": (hip, hip_discovery, hip.HipProvider), "cuda": (cuda, cuda_discovery, cuda.CudaProvider)}
VEGA = {"ordinal": 0, "name": "Radeon VII", "gcn_arch_name": "gfx906:sramecc+:xnack-"}
VOLTA = {"ordinal": 0, "name": "Tesla V100", "major": 7, "minor": 0}


class Searches:
    """A GPU provider on a machine of which ``found`` is what there is to find."""

    def __init__(self, kind: str, found: Discovery, monkeypatch: pytest.MonkeyPatch) -> None:
        module, _, made = KINDS[kind]
        self.count = 0
        self.found = found
        monkeypatch.setattr(module, "find", self._find)
        self.provider: GpuProvider = made()

    def _find(self, kind: str) -> Discovery:
        self.count += 1
        return self.found

    def refusal(self, device: str) -> NotFoundError:
        devices = DeviceRegistry({self.provider.kind: self.provider}, DeviceHost(lambda unit, arch: Path()))
        with pytest.raises(NotFoundError) as caught:
            devices.info(device)
        with pytest.raises(NotFoundError):
            devices.get(device)
        return caught.value


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All there."""
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: True)
    monkeypatch.setattr(gpu_provider, "version", lambda name: "13.0")


def parse(kind: str, record: dict[str, Any], root: Path) -> Discovery:
    return hip_discovery.parse(record, root=root) if kind == "hip" else cuda_discovery.parse(record)


@pytest.mark.parametrize("asked", ["{}:0", "{}:3", "{}"])
@pytest.mark.parametrize(
    ("kind", "record", "text", "fix"),
    [
        ("hip", None, "no AMD driver", "install ROCm 6.3"),
        ("hip", {"error": "library"}, "libamdhip64.so", "install ROCm 6.3"),
        ("hip", {"error": "driver", "reason": "hipErrorNoDevice"}, "hipErrorNoDevice", "--device /dev/kfd"),
        ("hip", {"driver": 60_200_000, "devices": []}, "ROCm 6.2", "install ROCm 6.3"),
        ("hip", {"driver": 70_000_000, "devices": [VEGA]}, "Radeon VII: gfx906 is not supported", "adding-an-arch"),
        ("cuda", None, "no NVIDIA driver", "install the NVIDIA driver 580"),
        ("cuda", {"error": "library"}, "libcuda.so.1", "--gpus all"),
        ("cuda", {"driver": 12080, "devices": []}, "CUDA 12.8", "580"),
        ("cuda", {"driver": 13000, "devices": [VOLTA]}, "Tesla V100: compute capability 7.0", "arch list"),
    ],
)
def test_refusal_says_what_doctor_would(
    kind: str, record: dict[str, Any] | None, text: str, fix: str, asked: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    found = KINDS[kind][1].find(root=tmp_path) if record is None else parse(kind, record, tmp_path)
    searches = Searches(kind, found, monkeypatch)
    error = searches.refusal(asked.format(kind))
    assert error.reason.startswith("this server has no such device: ")
    assert text in error.reason
    assert fix in error.fix
    assert error.fix.endswith("; then start the server again")
    assert (error.code, error.rule, error.field) == ("not_found", "device_id", "device")
    said = "\n".join(searches.provider.diagnose().values())
    assert text in said
    assert fix in said
    assert str(tmp_path) not in str(error)
    assert searches.count == 1, "the machine is asked once"


@pytest.mark.parametrize("kind", KINDS)
def test_missing_packages_are_named_without_asking_the_driver(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(kind, Discovery(), monkeypatch)
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: False)
    error = searches.refusal(f"{kind}:0")
    assert next(iter(searches.provider.packages)) in error.reason
    assert "not installed" in error.reason
    assert f"pip install 'tilewright[{kind}]'; then" in error.fix
    monkeypatch.setattr(gpu_provider, "_installed", lambda name: True)  # meanwhile; nobody is to wait for a driver
    searches.refusal(f"{kind}:0")
    assert searches.count == 0


def test_package_that_is_too_old_is_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_provider, "version", lambda name: "7.2.2")
    error = Searches("hip", Discovery(), monkeypatch).refusal("hip:0")
    assert "hip-python 7.2.2 is too old" in error.reason
    assert "--upgrade" in error.fix


def one(kind: str) -> DeviceInfo:
    return DeviceInfo(f"{kind}:1", kind, "a GPU", load("x86-64-v2"), 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_device_that_was_left_out_is_told_from_one_that_never_was(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = {"driver": 70_000_000, "devices": [VEGA if kind == "hip" else VOLTA]}
    alone = parse(kind, record, tmp_path)
    searches = Searches(kind, Discovery((one(kind),), alone.driver, left_out=alone.left_out), monkeypatch)
    error = searches.refusal(f"{kind}:0")
    assert "is not supported" in error.reason
    assert error.fix.endswith(f", or use {kind}:1")
    never = searches.refusal(f"{kind}:7")
    assert (never.reason, never.fix) == ("this server has no such device", f"use {kind}:1")


@pytest.mark.parametrize("kind", KINDS)
def test_search_that_failed_is_said_without_its_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(kind, Discovery(), monkeypatch)
    monkeypatch.setattr(searches.provider, "search", lambda: (_ for _ in ()).throw(OSError("/home/somebody/secret")))
    error = searches.refusal(f"{kind}:0")
    assert f"devices of kind {kind} failed" in error.reason
    assert "doctor" in error.fix
    assert "secret" not in str(error)


def test_gpu_providers_explain() -> None:
    assert all(isinstance(made(), ExplainingProvider) for _, _, made in KINDS.values())


@pytest.mark.parametrize(
    ("kind", "record"),
    [("hip", {"driver": 70_000_000, "devices": [VEGA]}), ("cuda", {"driver": 13000, "devices": [VOLTA]})],
)
@pytest.mark.extended
def test_doctor_does_not_call_a_chip_without_kernels_ok(
    kind: str, record: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Searches(kind, parse(kind, record, tmp_path), monkeypatch)
    found = {item.topic: item for item in doctor.examine()}
    row = found[f"{kind} note 1"]
    assert row.state == "note"
    assert f"{kind}:0: {record['devices'][0]['name']}" in row.detail
    assert "did you mean" not in row.detail
    assert row.fix
    assert (found[f"{kind} devices"].state, bool(found[f"{kind} devices"].fix)) == ("note", True)
