"""Kernels that ended the process of their device, and are not run there again for a while.

A device in a process of its own survives a kernel that faults. A kernel that faults each time would take the device
from everybody again and again, so it is refused after the second time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from tilewright_kit.types.errors import DeviceError

__all__ = ["Quarantine"]

_ENOUGH = 2.0
_ALMOST = 1e-6


class Quarantine:
    """Thread-safe."""

    def __init__(self, ttl_s: float = 600.0) -> None:
        """``ttl_s`` after its last fault a kernel is trusted again."""
        self._ttl_s = ttl_s
        self._blamed: dict[tuple[str, str], tuple[float, float]] = {}
        self._lock = threading.Lock()

    def blame(self, device: str, kernels: Iterable[str], share: float) -> list[str]:
        """These ran when the device was lost, with a chance of ``share`` that they were the cause.

        Returns those that are refused from now on: their shares add up to two losses.
        """
        now = time.monotonic()
        refused = []
        with self._lock:
            self._blamed = {key: item for key, item in self._blamed.items() if item[1] > now}
            for kernel in kernels:
                blame = self._blamed.get((device, kernel), (0.0, 0.0))[0] + share
                self._blamed[device, kernel] = (blame, now + self._ttl_s)
                if blame >= _ENOUGH - _ALMOST:
                    refused.append(kernel)
        return refused

    def holds(self, device: str, kernel: str) -> bool:
        """True if the kernel is refused on the device."""
        if not self._blamed:
            return False
        blame, until = self._blamed.get((device, kernel), (0.0, 0.0))
        return blame >= _ENOUGH - _ALMOST and time.monotonic() < until

    def check(self, device: str, kernels: Iterable[str]) -> None:
        """Raise ``DeviceError`` if one of them is refused."""
        for kernel in kernels:
            if self.holds(device, kernel):
                raise refusal(kernel)


def refusal(kernel: str) -> DeviceError:
    """Why a kernel is not run."""
    return DeviceError(
        "this kernel ended the process of its device more than once, and is not run there for a while",
        field="kernel",
        value=kernel,
        rule="kernel_quarantined",
        fix="let the server choose another kernel, and report this one with the server's log",
    )
