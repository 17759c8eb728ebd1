"""What the HIP device does with code objects and arguments before the runtime sees them: no GPU, no runtime."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hip_device_cases import UNIT

import tilewright_arch
from tilewright_arch import from_gcn_arch_name
from tilewright_kit.contract.plan import Geometry
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import DeviceError
from tilewright_server.devices.hip.driver.api import HipApi
from tilewright_server.devices.hip.driver.module import MACHINES, HipFunction, check_code_object

Build = Callable[[SourceUnit, tilewright_arch.ArchSpec], Path]


# Code objects


@pytest.fixture(scope="module")
def binaries(build: Build) -> Callable[[str], bytes]:
    return lambda name: build(UNIT, from_gcn_arch_name(name)).read_bytes()


def chips() -> list[str]:
    specs = [tilewright_arch.load(name) for name in tilewright_arch.names()]
    return [name for spec in specs if spec.kind == "hip" for name in spec.match.gcn_arch_names]


@pytest.mark.parametrize("name", chips())
def test_code_objects_are_taken_by_their_own_chip_only(name: str, binaries: Callable[[str], bytes]) -> None:
    data, arch = binaries(name), from_gcn_arch_name(name)
    code = check_code_object(data, arch, f"{name}:sramecc+:xnack-")
    assert code.elf_flags & 0xFF == MACHINES[name]
    assert {kernel.name for kernel in code.kernels} == set(UNIT.entries)
    for other in MACHINES:
        if other != name:
            with pytest.raises(DeviceError, match=f"it is for {name}, and this is {other}") as caught:
                check_code_object(data, from_gcn_arch_name(other), other)
            assert caught.value.rule == "module_load"


def test_code_object_of_another_machine_number_is_refused(binaries: Callable[[str], bytes]) -> None:
    data, arch = bytearray(binaries("gfx942")), from_gcn_arch_name("gfx942")
    for offset, value, why in ((48, MACHINES["gfx950"], "it is for gfx942"), (18, 62, "ELF machine 62"), (0, 0, "ELF")):
        wrong = bytearray(data)
        wrong[offset] = value
        with pytest.raises(DeviceError, match=why):
            check_code_object(bytes(wrong), arch, "gfx942")
    with pytest.raises(DeviceError):
        check_code_object(bytes(data[:200]), arch, "gfx942")
    with pytest.raises(DeviceError):
        check_code_object(b"", arch, "gfx942")


def test_waves_of_another_size_are_found_before_the_runtime_sees_them(binaries: Callable[[str], bytes]) -> None:
    arch = dataclasses.replace(from_gcn_arch_name("gfx1100"), wave_size=64)
    with pytest.raises(DeviceError, match="waves of 32, and gfx1100 of 64"):
        check_code_object(binaries("gfx1100"), arch, "gfx1100")


def test_features_that_the_device_has_not_are_refused(build: Build) -> None:
    arch = from_gcn_arch_name("gfx942")
    aimed = dataclasses.replace(
        arch, toolchain=dataclasses.replace(arch.toolchain, flags=("--offload-arch=gfx942:xnack+",))
    )
    data = build(UNIT, aimed).read_bytes()
    assert check_code_object(data, arch, "gfx942:sramecc+:xnack+").features == ("xnack+",)
    with pytest.raises(DeviceError, match=r"needs xnack\+"):
        check_code_object(data, arch, "gfx942:sramecc+:xnack-")


def test_launches_beyond_the_limits_are_refused_by_validation(binaries: Callable[[str], bytes]) -> None:
    arch = from_gcn_arch_name("gfx942")
    facts = {kernel.name: kernel for kernel in check_code_object(binaries("gfx942"), arch, "gfx942").kernels}
    add, shared = HipFunction(1, facts["add"], arch), HipFunction(2, facts["shared_bytes"], arch)
    assert add.param_bytes == 32
    add.admit(Geometry(grid=(4, 1, 1), block=(256, 1, 1)), 64)
    fixed = facts["shared_bytes"].lds_bytes
    assert fixed >= 64
    shared.admit(Geometry(block=(64, 1, 1), shared_bytes=arch.lds_bytes - fixed), 64)
    refused: list[tuple[HipFunction, Geometry]] = [
        (add, Geometry(cluster=(2, 1, 1))),
        (add, Geometry(dependent=True)),
        (add, Geometry(block=(257, 1, 1))),
        (add, Geometry(block=(0, 1, 1))),
        (add, Geometry(grid=(0, 1, 1))),
        (add, Geometry(grid=(1 << 24, 1, 1), block=(256, 1, 1))),
        (shared, Geometry(shared_bytes=arch.lds_bytes - fixed + 1)),
    ]
    for function, geometry in refused:
        with pytest.raises(DeviceError) as caught:
            function.admit(geometry, 64)
        assert caught.value.rule == "kernel_geometry"
        assert caught.value.value is not None
    for nbytes in (0, 24, 96, 128):
        with pytest.raises(DeviceError) as caught:
            add.admit(Geometry(), nbytes)
        assert caught.value.rule == "kernel_parameters"
    with pytest.raises(DeviceError, match="more than one parameter"):
        HipFunction(3, facts["two"], arch)


# The driver's calls


class Recorder:
    """A runtime that remembers what it was called with."""

    hipMemAllocationHandleType = SimpleNamespace(hipMemHandleTypePosixFileDescriptor="fd")

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def hipModuleLaunchKernel(self, *arguments: Any) -> tuple[int]:
        self.asked.append(arguments)
        return (0,)

    def hipMemImportFromShareableHandle(self, handle: Any, kind: str) -> tuple[int, str]:
        self.asked.append(handle)
        return 0, "allocation"


def test_descriptors_are_given_as_the_runtime_wants_them() -> None:
    raw = Recorder()
    HipApi(raw, 70_100_000).import_fd(7)
    HipApi(raw, 70_099_999).import_fd(7)
    new, old = raw.asked
    assert new == 7
    assert (type(old), old.value) == (ctypes.c_int, 7)
