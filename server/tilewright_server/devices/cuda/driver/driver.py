"""The CUDA driver, loaded when it is first needed, and what only GPUs of NVIDIA have."""

from __future__ import annotations

from typing import Any

from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.cuda.driver.api import CudaApi
from tilewright_server.devices.cuda.driver.errors import RESULTS
from tilewright_server.devices.cuda.driver.module import CudaImage
from tilewright_server.devices.gpu.driver import GpuDriver

__all__ = ["CONTAINER_FIX", "DRIVER_FIX", "INSTALL", "MIN_DRIVER", "Driver", "load_api"]

MIN_DRIVER = 13000
"""CUDA 13.0, which drivers from 580 on speak: the binaries are for it."""

DRIVER_FIX = "install the NVIDIA driver 580 or later"
CONTAINER_FIX = "start the container with the NVIDIA runtime (docker run --gpus all)"
INSTALL = "pip install 'tilewright[cuda]'"


def load_api() -> Any:
    """``cuda.bindings.driver``. Raises ``UnavailableError`` where the package is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnavailableError(
            "the package cuda-bindings is not installed",
            rule="device_driver",
            value=type(error).__name__,
            fix=INSTALL,
        ) from error
    return driver


class Driver(GpuDriver):
    """See ``GpuDriver``."""

    kind = "cuda"
    ipc_kind = "cuda_ipc"
    pool_kind = "cuda_pool"

    def __init__(self, raw: Any, device_id: str = "") -> None:
        """``raw`` is ``cuda.bindings.driver``."""
        super().__init__(CudaApi(raw), RESULTS, device_id)

    @classmethod
    def open(cls, device_id: str = "") -> Driver:
        """Load and initialise it. Raises ``UnavailableError`` (no package, no driver, too old a driver)."""
        driver = cls(load_api(), device_id)
        try:
            driver.check(driver.api.raw.cuInit(0))
            version = int(driver.check(driver.api.raw.cuDriverGetVersion()))
        except RuntimeError as error:  # the package found no libcuda.so.1, or not all of it
            raise UnavailableError(
                "the NVIDIA driver's library (libcuda.so.1) cannot be loaded",
                rule="device_driver",
                value=type(error).__name__,  # its text has paths
                fix=f"{DRIVER_FIX}; in a container, {CONTAINER_FIX}",
            ) from error
        if version < MIN_DRIVER:
            raise UnavailableError(
                f"the NVIDIA driver is for CUDA {version // 1000}.{version % 1000 // 10}",
                rule="device_driver",
                value=version,
                fix=f"{DRIVER_FIX} (CUDA 13.0)",
            )
        return driver

    def result(self, code: int) -> Any:
        try:
            return self.api.raw.CUresult(code)
        except ValueError:  # of a later driver
            return self.api.raw.CUresult.CUDA_ERROR_UNKNOWN

    def image(self, data: bytes) -> CudaImage:
        return CudaImage(self, data)

    def release(self, context: Any) -> None:
        """The device, whose primary context was retained."""
        self.quietly(self.api.raw.cuDevicePrimaryCtxRelease(context))
