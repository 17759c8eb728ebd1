"""Devices of tests that run on GPUs, and another process as the client whose memory they share."""

from __future__ import annotations

import array
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_device_cases import GPUS, Gpu

from tilewright_kit.contract.device import Buffer, Device
from tilewright_kit.contract.plan import I64, Geometry, Pointer, Struct, pack
from tilewright_server.devices.contract import MemoryHandle, ProgramStage

__all__ = ["ADD", "GPUS", "HERE", "WAYS", "Client", "Gpu", "N", "get", "put", "settled", "stage"]

N = 4096
HERE = Path(__file__).parent
ADD = Struct((Pointer("x"), Pointer("y"), Pointer("out"), I64(N)))
WAYS = ("ipc", "pool", "fd")
"""In which memory is handed over: the ends of the kinds of handles."""


def put(device: Device, array: np.ndarray) -> Buffer:
    buffer = device.allocate(array.nbytes)
    device.write(buffer, 0, memoryview(array))
    return buffer


def get(device: Device, buffer: Buffer, dtype: Any = np.float32) -> np.ndarray:
    result = np.empty(buffer.nbytes // np.dtype(dtype).itemsize, dtype)
    device.read(buffer, 0, memoryview(result))
    return result


def stage(function: int, args: Struct, **geometry: Any) -> ProgramStage:
    return ProgramStage(function, pack(args), Geometry(**{"grid": (4, 1, 1), "block": (128, 1, 1), **geometry}))


def settled(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Client:
    """The process of ``gpu_client.py``."""

    def __init__(self, kind: str, binary: Path, ordinal: int = 0) -> None:
        self.kind = kind
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_client.py"), kind, str(theirs.fileno()), str(binary), str(ordinal)],
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(60)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        answer, fd = self.ask_fd(do, **arguments)
        assert fd < 0
        return answer

    def ask_fd(self, do: str, **arguments: Any) -> tuple[dict[str, Any], int]:
        self.socket.send(json.dumps({"do": do, **arguments}).encode())
        data, rights, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        answer = json.loads(data)
        assert "error" not in answer, answer
        fds = array.array("i")
        for _, _, part in rights:
            fds.frombytes(part)
        return answer, fds[0] if fds else -1

    def handle(self, way: str, offset: int = 0, nbytes: int = 4 * N) -> MemoryHandle:
        """Memory of the client; the descriptor is the caller's to close."""
        answer, fd = self.ask_fd({"ipc": "legacy", "pool": "pooled", "fd": "virtual"}[way])
        kind = way if way == "fd" else f"{self.kind}_{way}"
        return MemoryHandle(kind, bytes.fromhex(answer["data"]), nbytes, fd, offset)

    def close(self) -> None:
        self.socket.close()
        try:
            assert self.process.wait(30) in (0, -9)
        finally:
            self.process.kill()
            self.process.wait()
