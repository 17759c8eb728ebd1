"""Loaded binaries, and the numbers of their entry points."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tilewright_kit.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.base import DeviceLostError
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction, Image

__all__ = ["GpuModule"]


class GpuModule:
    """A loaded binary. ``known`` is the device's table of functions by number; ``unloading`` is told of its end, and
    calls back when nothing can be running any more."""

    def __init__(
        self,
        driver: GpuDriver,
        binary: Path,
        known: dict[int, GpuFunction],
        unloading: Callable[[GpuModule, Callable[[], None]], None],
    ) -> None:
        """Raises ``DeviceError`` if it is no binary for this device."""
        self._driver = driver
        self._known = known
        self._unloading = unloading
        self._functions: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            # A private copy, which the driver copies once more: the file may change meanwhile.
            self._image: Image | None = driver.image(binary.read_bytes())
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
        self._driver.enter()
        with self._lock:
            if symbol in self._functions:
                return self._functions[symbol]
            function = self._image.function(symbol) if self._image is not None else None
            if function is not None:
                number = self._functions[symbol] = int(function.handle)
                self._known[number] = function
                return number
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
            image, self._image = self._image, None
            functions, self._functions = self._functions, {}
        if image is None:
            return
        for number in functions.values():
            self._known.pop(number, None)
        self._unloading(self, image.unload)
