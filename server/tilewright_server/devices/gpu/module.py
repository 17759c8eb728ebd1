"""Loaded binaries, and the numbers of their entry points."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.contract import DeviceLostError
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction, Image

__all__ = ["MODULE_RULE", "GpuModule", "check_arguments", "check_parameters"]

MODULE_RULE = "module_load"
"""Rule for a binary that cannot be loaded; an image that knows more of the cause says so itself."""
_SPARE = 64
"""Arguments come in multiples of so many bytes."""


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
            if getattr(error, "rule", "") == MODULE_RULE:
                raise
            raise DeviceError(
                "the kernel's binary cannot be loaded",
                value=getattr(error, "value", ""),
                rule=MODULE_RULE,
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


def check_parameters(symbol: str, count: int) -> None:
    """``DeviceError`` for a kernel that takes its arguments otherwise than they are given."""
    if count > 1:
        raise DeviceError(
            f"the kernel {symbol} takes more than one parameter",
            field="entry",
            value=symbol,
            rule="kernel_parameters",
            fix="let it take one structure by value",
        )


def check_arguments(symbol: str, given: int, taken: int) -> None:
    """``DeviceError`` if a launch brings fewer bytes than the kernel takes, or more than the plan can have meant."""
    if not taken <= given or given - taken >= _SPARE:
        raise DeviceError(
            f"the plan brings {given} bytes of arguments, and {symbol} takes {taken}",
            field="args",
            value=given,
            rule="kernel_parameters",
            fix="report it as a fault of the operation's plugin",
        )
