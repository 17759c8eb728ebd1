"""Loaded binaries and their entry points."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright_kit.errors import DeviceError, ResourceExhaustedError
from tilewright_kit.plan import Geometry
from tilewright_server.devices.base import DeviceLostError
from tilewright_server.devices.cuda.driver import Driver

__all__ = ["CudaModule", "Function"]

_PORTABLE_CLUSTER = 8
"""Workgroups that a cluster may have on any device. CUDA programming guide, thread block clusters."""


class Function:
    """An entry point with what a launch must know of it."""

    __slots__ = ("_cluster", "_driver", "_lock", "_shared_bytes", "handle", "param_bytes", "symbol")

    def __init__(self, driver: Driver, handle: Any, symbol: str) -> None:
        api = driver.api
        self.handle = handle
        self.symbol = symbol
        self._driver = driver
        self._shared_bytes = 0
        self._cluster = 1
        self._lock = threading.Lock()
        # Code that is loaded at its first launch would make that launch wait for everything else on the device.
        driver.check(api.cuFuncLoad(handle), "loading a kernel")
        info = api.cuFuncGetParamInfo(handle, 0)
        # The offset that comes with the size counts from before the first parameter on some drivers.
        self.param_bytes = 0 if info[0] else int(info[2])
        """Size of the one parameter; 0 if the entry takes none."""
        if not api.cuFuncGetParamInfo(handle, 1)[0]:
            raise DeviceError(
                f"the kernel {symbol} takes more than one parameter",
                field="entry",
                value=symbol,
                rule="kernel_parameters",
                fix="let it take one structure by value",
            )

    def admit(self, geometry: Geometry, args_bytes: int) -> None:
        """Make a launch of that geometry legal. Raises ``DeviceError`` if the arguments are too few or too many, or
        the device has not so much shared memory."""
        if not self.param_bytes <= args_bytes or args_bytes - self.param_bytes >= 64:
            raise DeviceError(
                f"the plan brings {args_bytes} bytes of arguments, and {self.symbol} takes {self.param_bytes}",
                field="args",
                value=args_bytes,
                rule="kernel_parameters",
                fix="report it as a fault of the operation's plugin",
            )
        api, check = self._driver.api, self._driver.check
        cluster = geometry.cluster[0] * geometry.cluster[1] * geometry.cluster[2]
        with self._lock:
            if geometry.shared_bytes > self._shared_bytes:
                attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(
                    api.cuFuncSetAttribute(self.handle, attribute, geometry.shared_bytes),
                    f"{geometry.shared_bytes} bytes of shared memory for a kernel",
                )
                self._shared_bytes = geometry.shared_bytes
            if cluster > max(_PORTABLE_CLUSTER, self._cluster):
                attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                check(api.cuFuncSetAttribute(self.handle, attribute, 1), f"clusters of {cluster} workgroups")
                self._cluster = cluster


class CudaModule:
    """A loaded cubin. ``known`` is the device's table of functions by number; ``unloading`` is told of its end, and
    calls back when nothing can be running any more."""

    def __init__(
        self,
        driver: Driver,
        binary: Path,
        known: dict[int, Function],
        unloading: Callable[[CudaModule, Callable[[], None]], None],
    ) -> None:
        """Raises ``DeviceError`` if it is no binary for this device."""
        self._driver = driver
        self._known = known
        self._unloading = unloading
        self._functions: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            # A private copy, which the driver copies once more: the file may change meanwhile.
            data = binary.read_bytes()
            if not data.startswith(b"\x7fELF"):
                raise ValueError
            self._module: Any = driver.check(driver.api.cuModuleLoadData(data + b"\0"))
        except (DeviceLostError, ResourceExhaustedError):
            raise
        except (OSError, ValueError, DeviceError) as error:
            raise DeviceError(
                "the kernel's binary cannot be loaded",
                value=getattr(error, "value", ""),
                rule="module_load",
                fix="clear the cache of compiled kernels, and compare driver and compiler with `tilewright doctor`",
            ) from error

    def function(self, symbol: str) -> int:
        driver = self._driver
        driver.enter()
        with self._lock:
            if symbol in self._functions:
                return self._functions[symbol]
            if self._module is not None:
                answer = driver.api.cuModuleGetFunction(self._module, symbol.encode())
                if not answer[0]:
                    function = Function(driver, answer[1], symbol)
                    number = self._functions[symbol] = int(answer[1])
                    self._known[number] = function
                    return number
                if answer[0].name != "CUDA_ERROR_NOT_FOUND":
                    raise driver.error(answer[0], "an entry of a kernel's binary")
        raise DeviceError(
            f"the kernel's binary has no entry {symbol}",
            field="entry",
            value=symbol,
            rule="module_entry",
            fix="report it as a fault of the operation's plugin",
        )

    def unload(self) -> None:
        """Takes effect when what was launched has ended. Idempotent."""
        with self._lock:
            module, self._module = self._module, None
            functions, self._functions = self._functions, {}
        if module is None:
            return
        for number in functions.values():
            self._known.pop(number, None)
        self._unloading(self, lambda: self._destroy(module))

    def _destroy(self, module: Any) -> None:
        self._driver.quietly(self._driver.api.cuModuleUnload(module))
