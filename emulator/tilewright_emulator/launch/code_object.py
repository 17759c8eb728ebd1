"""Code objects and their kernels: load, inspect, launch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tilewright_emulator.code.image import Image
from tilewright_emulator.code.kernel import KernelCode
from tilewright_emulator.launch.launch import Report, launch
from tilewright_emulator.memory.allocations import Memory
from tilewright_emulator.state.run import Checks

KEPT = 64  # code objects, the oldest goes first
_LOADED: dict[str, CodeObject] = {}


class CodeObject(Image):
    """A loaded ELF image. ``load`` returns the same object for the same bytes."""

    def __init__(self, image: bytes) -> None:
        super().__init__(image)
        self._kernels: dict[str, Kernel] = {}

    @staticmethod
    def load(source: bytes | str | Path) -> CodeObject:
        """From bytes or a file. Raises ``BadCodeObject``, ``ToolMissing`` (llvm-objdump 19 or later)."""
        image = bytes(source) if isinstance(source, (bytes, bytearray, memoryview)) else Path(source).read_bytes()
        digest = hashlib.sha256(image).hexdigest()
        if digest not in _LOADED:
            if len(_LOADED) >= KEPT:
                _LOADED.pop(next(iter(_LOADED)))
            _LOADED[digest] = CodeObject(image)
        return _LOADED[digest]

    def kernel(self, name: str) -> Kernel:
        """Raises ``BadCodeObject`` if there is none of this name."""
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]


class Kernel(KernelCode):
    """One kernel, which can be launched."""

    def launch(
        self,
        memory: Memory,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: bytes,
        dynamic_lds: int = 0,
        checks: Checks | None = None,
    ) -> Report:
        """Runs the kernel. ``grid`` counts workgroups. Raises ``EmulationError``."""
        return launch(self, memory, grid, block, arguments, dynamic_lds, checks or Checks())
