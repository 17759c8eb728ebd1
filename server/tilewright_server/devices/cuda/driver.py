"""The CUDA driver, loaded when it is first needed, with its results as typed errors."""

from __future__ import annotations

import threading
from typing import Any

from tilewright_kit.errors import TilewrightError, UnavailableError
from tilewright_server.devices.base import DeviceLostError
from tilewright_server.devices.cuda.errors import error_of, lost_error

__all__ = ["CONTAINER_FIX", "DRIVER_FIX", "MIN_DRIVER", "Driver", "load_api"]

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


class Driver:
    """The driver's functions (``api``) for one device, and the current context of each thread.

    ``check`` unpacks an answer: None, the one value, or a tuple of them.
    """

    def __init__(self, api: Any, device_id: str = "") -> None:
        self.api = api
        self.device_id = device_id
        self.lost: DeviceLostError | None = None
        """The first sticky error, after which nothing works."""
        self._context: Any = None
        self._thread = threading.local()

    @classmethod
    def open(cls, device_id: str = "") -> Driver:
        """Load and initialise it. Raises ``UnavailableError`` (no package, no driver, too old a driver)."""
        driver = cls(load_api(), device_id)
        try:
            driver.check(driver.api.cuInit(0))
            version = int(driver.check(driver.api.cuDriverGetVersion()))
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

    def bind(self, context: Any) -> None:
        """From now on ``enter`` makes ``context`` the current one."""
        self._context = context

    def enter(self) -> None:
        """Make the context current in this thread. Costs nothing the second time. Raises the sticky error, if any."""
        if self.lost is not None:
            raise self._again()
        if getattr(self._thread, "entered", None) is not self._context:
            self.check(self.api.cuCtxSetCurrent(self._context))
            self._thread.entered = self._context

    def check(self, answer: tuple[Any, ...], doing: str = "") -> Any:
        """The values of an answer. Raises its error: ``DeviceError``, ``ResourceExhaustedError``,
        ``UnavailableError``, and ``DeviceLostError`` from the first sticky one on."""
        if answer[0]:
            raise self.error(answer[0], doing)
        if len(answer) == 2:
            return answer[1]
        return answer[1:] or None

    def error(self, result: Any, doing: str = "") -> TilewrightError:
        """The typed error for a result that is none of success; remembers sticky ones."""
        error = error_of(result.name, self.device_id, doing)
        if result.name == "CUDA_ERROR_UNKNOWN" and self._is_broken():
            error = lost_error(result.name, self.device_id)
        if isinstance(error, DeviceLostError) and self.lost is None:
            self.lost = error
        return error

    def quietly(self, answer: tuple[Any, ...]) -> bool:
        """For giving things back: True if that worked. A sticky error is noted, not raised."""
        if answer[0]:
            self.error(answer[0])
        return not answer[0]

    def _is_broken(self) -> bool:
        """Whether a call that nothing is wrong with fails as well."""
        if self._context is None:
            return False
        result, event = self.api.cuEventCreate(0)
        if not result:
            self.api.cuEventDestroy(event)
        return bool(result)

    def _again(self) -> DeviceLostError:
        assert self.lost is not None
        return DeviceLostError(self.lost.reason, device=self.device_id)
