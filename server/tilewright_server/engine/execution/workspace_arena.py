"""Workspace: scratch memory of plans, recycled by size class, so that a warm execution allocates nothing.

Workspace is never visible to a client, so it is not zeroed between uses. What a client can see (outputs that the server
allocates, resident buffers) comes from ``Device.allocate``, which zeroes, and is never taken from here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from tilewright_kit.contract.device import Buffer, Device
from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.devices.lifetime import is_lost

__all__ = ["Arena"]

_SMALLEST = 16
"""Logarithm of the smallest class: 64 KiB."""
_NOTHING = Buffer(0, 0)


class Arena:
    """The workspace of one device. Thread-safe. Takes memory when a size is first needed, gives it back when idle."""

    def __init__(self, device: Device, limit_bytes: int, idle_s: float = 60.0) -> None:
        self._device = device
        self._limit = limit_bytes
        self._idle_s = idle_s
        self._free: dict[int, deque[tuple[Buffer, float]]] = {}
        self._lock = threading.Lock()
        self._next_trim = time.monotonic() + idle_s
        self.reserved_bytes = 0
        """Bytes taken from the device, in use or idle, and those that were claimed."""

    def take(self, nbytes: int) -> Buffer:
        """At least ``nbytes`` bytes of any content. Raises ``ResourceExhaustedError`` at the limit."""
        if nbytes <= 0:
            return _NOTHING
        size = _size_class(nbytes)
        try:
            return self._free[size].pop()[0]
        except (KeyError, IndexError):
            return self._reserve(size)

    def give_back(self, buffer: Buffer) -> None:
        """Keep a buffer for the next who needs its size."""
        if buffer is _NOTHING:
            return
        if is_lost(buffer):
            self._lose((buffer,))
            return
        now = time.monotonic()
        try:
            self._free[buffer.nbytes].append((buffer, now))
        except KeyError:
            with self._lock:
                self._free.setdefault(buffer.nbytes, deque()).append((buffer, now))
        if now >= self._next_trim:
            self.trim(self._idle_s)

    def claim(self, nbytes: int) -> None:
        """Count workspace that somebody else takes from the device. Raises ``ResourceExhaustedError`` at the limit."""
        with self._lock:
            self._make_room(nbytes)

    def disclaim(self, nbytes: int) -> None:
        """It was given back."""
        with self._lock:
            self.reserved_bytes -= nbytes

    def forget(self) -> None:
        """The device was lost, and all memory with it; what is in use now comes back later."""
        with self._lock:
            lost = [buffer for blocks in self._free.values() for buffer, _ in blocks]
            self._free.clear()
        self._lose(lost)

    def _lose(self, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            self.reserved_bytes -= sum(buffer.nbytes for buffer in buffers)

    def trim(self, idle_s: float = 0.0) -> int:
        """Give back blocks that were idle for ``idle_s``; returns their bytes."""
        with self._lock:
            self._next_trim = time.monotonic() + self._idle_s
            return self._trim(time.monotonic() - idle_s, self.reserved_bytes)

    def _trim(self, before: float, wanted: int) -> int:
        """Free idle blocks, the oldest of each class first, until ``wanted`` bytes are free. Lock held."""
        freed = 0
        for blocks in tuple(self._free.values()):
            while freed < wanted:
                try:
                    buffer, since = blocks.popleft()
                except IndexError:
                    break
                if since > before:
                    blocks.appendleft((buffer, since))
                    break
                self._device.free(buffer)
                self.reserved_bytes -= buffer.nbytes
                freed += buffer.nbytes
        return freed

    def _reserve(self, size: int) -> Buffer:
        with self._lock:
            self._make_room(size)
        try:
            return self._device.allocate(size)
        except BaseException:
            with self._lock:
                self.reserved_bytes -= size
            raise

    def _make_room(self, size: int) -> None:
        """Lock held."""
        over = self.reserved_bytes + size - self._limit
        if over > 0:
            self._trim(time.monotonic(), over)
            if self.reserved_bytes + size > self._limit:
                raise self._used_up(size)
        self.reserved_bytes += size

    def _used_up(self, size: int) -> ResourceExhaustedError:
        """Waiting helps against what others hold, not against the limit itself."""
        alone = size > self._limit
        message = f"the workspace of this device is used up ({self._limit} bytes)"
        remedy = "run fewer executions at a time, release bindings"
        if alone:
            message = f"{size} bytes of workspace are more than the {self._limit} that this device may have"
            remedy = "work in smaller parts, choose a kernel that needs less workspace"
        return ResourceExhaustedError(
            message,
            field="workspace_bytes",
            value=size,
            rule="workspace_limit",
            fix=f"{remedy}, or raise the server's workspace_bytes",
            retry_after_s=None if alone else 0.05,
        )

    def close(self) -> None:
        """Give back everything that is idle."""
        self.trim()


def _size_class(nbytes: int) -> int:
    """The next of 64 KiB, 96 KiB, 128 KiB, 192 KiB, ...: a third of a block is wasted at most."""
    power = 1 << max(_SMALLEST, (nbytes - 1).bit_length())
    middle = power // 4 * 3
    return middle if middle >= nbytes and power > 1 << _SMALLEST else power
