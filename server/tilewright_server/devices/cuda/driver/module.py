"""Cubins and their entry points."""

from __future__ import annotations

import threading
from typing import Any

from tilewright_kit.contract.plan import Geometry
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.module import check_arguments, check_parameters

__all__ = ["CudaFunction", "CudaImage"]

_PORTABLE_CLUSTER = 8
"""Workgroups that a cluster may have on any device. CUDA programming guide, thread block clusters."""


class CudaFunction:
    """An entry point with what a launch must know of it."""

    __slots__ = ("_cluster", "_driver", "_lock", "_shared_bytes", "handle", "param_bytes", "symbol")

    def __init__(self, driver: GpuDriver, handle: Any, symbol: str) -> None:
        api = driver.api.raw
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
        check_parameters(symbol, 1 if api.cuFuncGetParamInfo(handle, 1)[0] else 2)

    def admit(self, geometry: Geometry, args_bytes: int) -> None:
        """Make a launch of that geometry legal. Raises ``DeviceError`` if the arguments are too few or too many, or
        the device has not so much shared memory."""
        check_arguments(self.symbol, args_bytes, self.param_bytes)
        api, check = self._driver.api.raw, self._driver.check
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


class CudaImage:
    """See ``Image``."""

    def __init__(self, driver: GpuDriver, data: bytes) -> None:
        """Raises ``ValueError``, ``DeviceError`` if it is no binary for this device."""
        if not data.startswith(b"\x7fELF"):
            raise ValueError
        self._driver = driver
        self._module = driver.check(driver.api.raw.cuModuleLoadData(data + b"\0"))

    def function(self, symbol: str) -> CudaFunction | None:
        driver = self._driver
        answer = driver.api.raw.cuModuleGetFunction(self._module, symbol.encode())
        if not answer[0]:
            return CudaFunction(driver, answer[1], symbol)
        if answer[0].name != driver.results.missing:
            raise driver.error(answer[0], "an entry of a kernel's binary")
        return None

    def unload(self) -> None:
        self._driver.quietly(self._driver.api.raw.cuModuleUnload(self._module))
