"""The emulator as a process: launches of the simulated HIP runtime, over a socket.

    python -m tilewright_emulator.serve FD

The runtime (tests/server/devices/hip_simulated/emulator.h) starts it and ends it by closing its side. A request is a
head and a body, an answer a result with a text; numbers are little-endian. Device memory is POSIX shared memory: it is
mapped by name, and the kernel sees it where the runtime has it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_emulator.errors import EmulationError, Misaligned, OutOfBounds, ToolMissing

__all__ = ["Server", "main"]

_REQUEST = struct.Struct("<IIQ")
_RUN = struct.Struct("<Q10I")
_RANGE = struct.Struct("<QQ40s")
_ANSWER = struct.Struct("<iI")
_TAKE_MODULE, _DROP_MODULE, _RUN_KERNEL = 1, 2, 3
_ILLEGAL_ADDRESS, _LAUNCH_FAILURE, _NOT_SUPPORTED = 700, 719, 801
"""``hipError_t``."""
_SHARED = "/dev/shm"


class Server:
    """Answers requests. ``load`` makes a code object of bytes, ``new_memory`` an empty memory of a device."""

    def __init__(self, load: Callable[[bytes], Any], new_memory: Callable[[], Any]) -> None:
        self._load = load
        self._new_memory = new_memory
        self._images: dict[int, bytes] = {}
        self._codes: dict[int, Any] = {}
        self._mapped: dict[str, npt.NDArray[np.uint8]] = {}

    def run(self, channel: socket.socket) -> None:
        """Until the other side ends."""
        while (head := _receive(channel, _REQUEST.size)) is not None:
            kind, _, size = _REQUEST.unpack(head)
            body = _receive(channel, size)
            if body is None:
                return
            result, text = self._answer(kind, body)
            told = text.encode("utf-8", "replace")
            channel.sendall(_ANSWER.pack(result, len(told)) + told)

    def _answer(self, kind: int, body: bytes) -> tuple[int, str]:
        try:
            if kind == _TAKE_MODULE:
                self._images[int.from_bytes(body[:8], "little")] = body[8:]
            elif kind == _DROP_MODULE:
                number = int.from_bytes(body, "little")
                self._images.pop(number, None)
                self._codes.pop(number, None)
            elif kind == _RUN_KERNEL:
                self._launch(body)
            else:
                return _NOT_SUPPORTED, f"there is no request {kind}"
        except (OutOfBounds, Misaligned) as error:
            return _ILLEGAL_ADDRESS, f"{type(error).__name__}: {error}"
        except ToolMissing as error:
            return _NOT_SUPPORTED, str(error)
        except EmulationError as error:
            return _LAUNCH_FAILURE, f"{type(error).__name__}: {error}"
        except Exception:  # whatever it is: the launch has failed, and its test wants to know why
            return _LAUNCH_FAILURE, traceback.format_exc()
        return 0, ""

    def _launch(self, body: bytes) -> None:
        module, *rest = _RUN.unpack_from(body)
        grid, block, (shared, name_bytes, argument_bytes, ranges) = rest[:3], rest[3:6], rest[6:]
        at = _RUN.size
        name = body[at : at + name_bytes].decode()
        arguments = body[at + name_bytes : at + name_bytes + argument_bytes]
        memory = self._memory(body[at + name_bytes + argument_bytes :], ranges)
        if module not in self._codes:
            self._codes[module] = self._load(self._images[module])
        kernel = self._codes[module].kernel(name)
        kernel.launch(memory, grid=tuple(grid), block=tuple(block), arguments=arguments, dynamic_lds=shared)

    def _memory(self, described: bytes, count: int) -> Any:
        memory, mapped = self._new_memory(), {}
        for place in range(count):
            base, size, padded = _RANGE.unpack_from(described, place * _RANGE.size)
            name = padded.partition(b"\0")[0].decode()
            array = self._mapped.get(name)
            mapped[name] = array if array is not None else _map(name)
            memory.map(base, mapped[name][:size], name=name)
        self._mapped = mapped  # what is not listed is gone
        return memory


def _map(name: str) -> npt.NDArray[np.uint8]:
    fd = os.open(_SHARED + name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(fd, 0), np.uint8)
    finally:
        os.close(fd)


def _receive(channel: socket.socket, size: int) -> bytes | None:
    """Exactly so many bytes, or None at the end."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            got = channel.recv_into(view[at:])
        except ConnectionError:  # the other side died
            return None
        if not got:
            return None
        at += got
    return bytes(data)


def main() -> int:
    """Serve on the descriptor that the command line names."""
    from tilewright_emulator import CodeObject, Memory

    with socket.socket(fileno=int(sys.argv[1])) as channel:
        Server(CodeObject.load, Memory).run(channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
