"""Code objects and their entry points. What a kernel takes is read from the code object, before the runtime sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.contract.plan import Geometry
from tilewright_kit.types.errors import DeviceError, InvalidArgumentError
from tilewright_server.build.toolchains.code_object import CodeObject, KernelFacts, read_code_object
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.module import MODULE_RULE, check_arguments, check_parameters

__all__ = ["MACHINES", "HipFunction", "HipImage", "check_code_object"]

MACHINES: Mapping[str, int] = {
    "gfx90a": 0x3F,
    "gfx942": 0x4C,
    "gfx950": 0x4F,
    "gfx1100": 0x41,
    "gfx1101": 0x46,
    "gfx1102": 0x47,
    "gfx1200": 0x48,
    "gfx1201": 0x4E,
}
"""EF_AMDGPU_MACH of the LLVM AMDGPU ABI: the low byte of an ELF image's ``e_flags``."""
_MACHINE_MASK = 0xFF
NEWEST_VERSION = 6
"""Version of the code object: what the runtimes of ROCm 6.3 load, the first that is not refused (``MIN_DRIVER``)."""
_LARGEST_SIDE = 2**32
"""Work-items that a grid has fewer of in each direction."""


class HipFunction:
    """A kernel, with what a launch must know of it."""

    __slots__ = ("_arch", "_facts", "handle", "param_bytes", "symbol")

    def __init__(self, handle: Any, facts: KernelFacts, arch: ArchSpec) -> None:
        check_parameters(facts.name, len(facts.arguments))
        self.handle = handle
        self.symbol = facts.name
        self.param_bytes = sum(facts.arguments)
        """Size of the one parameter; 0 if the entry takes none."""
        self._facts = facts
        self._arch = arch

    def admit(self, geometry: Geometry, args_bytes: int) -> None:
        check_arguments(self.symbol, args_bytes, self.param_bytes)
        facts, arch = self._facts, self._arch
        if geometry.cluster != (1, 1, 1) or geometry.dependent:
            raise self._refusal("clusters and dependent launches", geometry.cluster, "none on this device")
        threads = math.prod(geometry.block)
        if not 0 < threads <= facts.max_workgroup:
            raise self._refusal("a workgroup of that size", threads, f"{facts.max_workgroup} work-items")
        for groups, side in zip(geometry.grid, geometry.block, strict=True):
            if groups < 1 or side < 1 or groups * side >= _LARGEST_SIDE:
                raise self._refusal("a grid of that size", geometry.grid, "2**32 - 1 work-items in each direction")
        lds = facts.lds_bytes + geometry.shared_bytes
        if lds > arch.lds_bytes:
            raise self._refusal("so much LDS", lds, f"{arch.lds_bytes} bytes a workgroup")

    def _refusal(self, what: str, value: object, limit: str) -> DeviceError:
        return DeviceError(
            f"the kernel {self.symbol} cannot be launched with {what}; the limit: {limit}",
            field="geometry",
            value=value,
            rule="kernel_geometry",
            fix="report it as a fault of the operation's plugin",
        )


class HipImage:
    """See ``Image``."""

    def __init__(self, driver: GpuDriver, data: bytes, arch: ArchSpec, gcn_arch_name: str) -> None:
        """Raises ``DeviceError`` if it is no code object for this device."""
        self._driver = driver
        self._arch = arch
        self._facts = {kernel.name: kernel for kernel in check_code_object(data, arch, gcn_arch_name).kernels}
        self._data = data  # the runtime may read it for as long as the module is loaded
        self._module = driver.check(driver.api.raw.hipModuleLoadData(data))

    def function(self, symbol: str) -> HipFunction | None:
        facts = self._facts.get(symbol)
        if facts is None:
            return None
        driver = self._driver
        handle = driver.check(driver.api.raw.hipModuleGetFunction(self._module, symbol), "an entry of a code object")
        return HipFunction(handle, facts, self._arch)

    def unload(self) -> None:
        self._driver.quietly(self._driver.api.raw.hipModuleUnload(self._module))


def check_code_object(data: bytes, arch: ArchSpec, gcn_arch_name: str) -> CodeObject:
    """Content of a code object that the device can run.

    ``gcn_arch_name`` is for example ``gfx942:sramecc+:xnack-``. Raises ``DeviceError`` for anything else: the runtime
    would say less, or run a kernel whose waves have another size.
    """
    try:
        code = read_code_object(data)
    except InvalidArgumentError as error:
        raise _cannot(error.reason, "") from error
    if code.version > NEWEST_VERSION:
        text = (
            f"it has version {code.version} of the code object, and the runtime is only sure to load {NEWEST_VERSION}"
        )
        raise _cannot(
            text,
            code.version,
            f"compile with -mcode-object-version={NEWEST_VERSION}, or clear the cache of compiled kernels",
        )
    target, *features = gcn_arch_name.split(":")
    machine = code.elf_flags & _MACHINE_MASK
    if code.target != target or MACHINES.get(target, machine) != machine:
        raise _cannot(f"it is for {code.target or 'another device'}, and this is {target}", f"{code.elf_flags:#x}")
    for feature in code.features:
        if feature not in features:
            raise _cannot(f"it needs {feature}, and the device is {gcn_arch_name}", feature)
    for kernel in code.kernels:
        if kernel.wave != arch.wave_size:
            raise _cannot(f"{kernel.name} has waves of {kernel.wave}, and {arch.name} of {arch.wave_size}", kernel.wave)
    return code


def _cannot(
    why: str,
    value: object,
    fix: str = "clear the cache of compiled kernels, and compare device and compiler with `tilewright doctor`",
) -> DeviceError:
    return DeviceError(
        f"the kernel's binary cannot be loaded: {why}",
        field="binary",
        value=value,
        rule=MODULE_RULE,
        fix=fix,
    )
