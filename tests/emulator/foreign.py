"""Launches in an emulator of AMD GPUs that is not ours: a second opinion on code objects, where somebody has one.

The other emulator is a program that a command starts. It reads names of folders, one a line, and answers each with a
line of JSON: ``{}``, or ``{"error": TEXT}``. A folder holds ``launch.json``, the code object ``image.co``, the kernel's
argument segment ``kernarg`` and a file for each piece of memory; the files of writable pieces are changed in place.
``launch.json`` says where each lies in the address space, so that pointers mean the same on both sides, and where in
the image the kernel's descriptor is.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from tilewright_emulator import CodeObject, Memory
from tilewright_emulator.launch.launch import kernel_arguments

__all__ = ["Foreign", "ForeignError"]

CODE, KERNARG = 0x0FF0_0000_0000, 0x0FF8_0000_0000
Size = tuple[int, int, int]


class ForeignError(RuntimeError):
    """What the other emulator said when it could not execute a launch."""


class Foreign:
    """A running emulator. ``command`` as for a shell. Raises ``OSError`` if it does not start."""

    def __init__(self, command: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, text=True)

    def launch(
        self, image: bytes, name: str, arch: str, memory: Memory, grid: Size, block: Size, arguments: bytes, lds: int
    ) -> None:
        """One launch over ``memory``, whose writable arrays change. Sizes as for ``Kernel.launch``.

        Raises ``ForeignError`` with the other's words.
        """
        kernel = CodeObject.load(image).kernel(name)
        segment = kernel_arguments(kernel, arguments, grid, block, lds)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            (folder / "image.co").write_bytes(image)
            (folder / "kernarg").write_bytes(segment)
            pieces = []
            for number, piece in enumerate(memory.allocations):
                (folder / str(number)).write_bytes(piece.data.tobytes())
                pieces.append(
                    {"address": piece.start, "bytes": piece.data.size, "file": str(number), "writable": piece.writable}
                )
            order = {"arch": arch, "kernel": name, "grid": grid, "block": block, "lds": lds, "memory": pieces}
            places = {"code_at": CODE, "kernarg_at": KERNARG, "descriptor_at": kernel.descriptor.address}
            (folder / "launch.json").write_text(json.dumps(order | places))
            self._ask(folder)
            for number, piece in enumerate(memory.allocations):
                if piece.writable:
                    piece.data[:] = np.fromfile(folder / str(number), np.uint8)

    def _ask(self, folder: Path) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ForeignError(f"it ended with code {self._process.wait()}")
        if error := json.loads(line).get("error"):
            raise ForeignError(error)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
