"""Launches, prepared so far that only libtilewright's call is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright_kit.contract.plan import Geometry
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction
from tilewright_server.devices.gpu.launch.library import library

__all__ = ["BoundLaunch", "Stage"]


class Stage:
    """A function with the geometry that it is launched with."""

    __slots__ = ("function", "geometry")

    def __init__(self, function: GpuFunction, geometry: Geometry, args_bytes: int) -> None:
        """Raises ``DeviceError`` if the device cannot launch it so, or the arguments do not fit."""
        function.admit(geometry, args_bytes)
        self.function = function
        self.geometry = geometry


class BoundLaunch:
    """A program's launches on one stream with all arguments in place. The driver copies them at every launch."""

    __slots__ = ("_driver", "_free", "_library", "_stream", "count", "handle")

    def __init__(
        self, driver: GpuDriver, handle: int, count: int, stream: Any, free: Callable[[], None] | None = None
    ) -> None:
        """``handle`` is the binding, of ``count`` stages; ``free`` gives back what lies on the device."""
        self.handle = handle
        """Number of the binding in libtilewright; 0 once it is closed."""
        self.count = count
        self._driver = driver
        self._library = library()
        self._stream = int(stream)
        self._free = free

    def launch(self) -> None:
        """Put all stages on the stream. Raises ``DeviceError``, ``DeviceLostError``."""
        if self._library.native.tw_launch(self.handle, self._stream):
            raise self._library.error(self._driver)

    def launch_stage(self, place: int) -> None:
        """One stage alone."""
        if self._library.native.tw_launch_stage(self.handle, place, self._stream):
            raise self._library.error(self._driver)

    def close(self) -> None:
        """Give back what lies on the device, behind what was launched. Idempotent."""
        handle, self.handle = self.handle, 0
        if handle:
            self._library.native.tw_binding_close(handle)
        free, self._free = self._free, None
        if free is not None:
            free()
