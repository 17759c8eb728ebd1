"""Code objects and their kernels: load, inspect, launch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tilewright_kit.types.errors import InternalError, ToolchainMissingError
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.analysis.disassembly import Instruction as Printed

from .arch import BY_MACHINE, Arch
from .decode import parse
from .elf import Elf
from .errors import BadCodeObject, ToolMissing
from .instruction import Instruction
from .launch import Report, launch
from .memory import Memory
from .program import CALLS, Program
from .run import Checks

MACHINE_MASK, PRELOAD_PROLOGUE = 0xFF, 256
DISASSEMBLER = Disassembler()
KEPT = 64  # code objects, the oldest goes first
_LOADED: dict[str, CodeObject] = {}
FLOAT_MODE = 0xF0  # rounding to nearest even, subnormals kept: what the arithmetic does


class CodeObject:
    """A loaded ELF image. ``load`` gives the same object for the same bytes."""

    def __init__(self, image: bytes) -> None:
        self.elf = Elf(image)
        machine = self.elf.flags & MACHINE_MASK
        if machine not in BY_MACHINE:
            raise BadCodeObject(f"ELF machine {machine:#x} is none of {', '.join(a.name for a in BY_MACHINE.values())}")
        self.arch: Arch = BY_MACHINE[machine]
        try:
            functions = DISASSEMBLER.disassemble(image)
        except ToolchainMissingError as error:
            raise ToolMissing(str(error)) from error
        except InternalError as error:
            raise BadCodeObject(str(error)) from error
        self.printed = [printed for function in functions for printed in function.instructions]
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

    @property
    def kernel_names(self) -> list[str]:
        return [entry[".name"] for entry in self.elf.metadata.get("amdhsa.kernels", ())]

    def kernel(self, name: str) -> Kernel:
        """Raises ``BadCodeObject`` if there is none of this name."""
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]


def _read(printed: Printed) -> Instruction:
    return parse(printed.text, printed.address, printed.size, printed.target)


class Kernel:
    """One kernel: its facts, and its program."""

    def __init__(self, code: CodeObject, name: str) -> None:
        self.code, self.name, self.arch = code, name, code.arch
        self.descriptor = code.elf.descriptor(name)
        entries = {entry[".name"]: entry for entry in code.elf.metadata.get("amdhsa.kernels", ())}
        self.metadata: dict[str, Any] = entries[name]
        # Everything the kernel can reach: functions that it calls, too.
        first = next((i for i, printed in enumerate(code.printed) if printed.address == self.descriptor.entry), None)
        if first is None:
            raise BadCodeObject(f"{name}: its entry is not in the disassembly")
        self.program = Program(name, [_read(printed) for printed in _reachable(first, code, name)], self.arch)
        if self.metadata[".wavefront_size"] != self.arch.lanes:
            raise BadCodeObject(f"{name}: waves of {self.metadata['.wavefront_size']} are not emulated")
        if (mode := self.descriptor.rsrc1 >> 12 & 0xFF) != FLOAT_MODE:
            raise BadCodeObject(f"{name}: mode {mode:#x} of floats is not emulated, only {FLOAT_MODE:#x}")

    @property
    def entry(self) -> int:
        """Where waves start: behind the loads that stand in for preloading on GPUs without it."""
        return self.descriptor.entry + (PRELOAD_PROLOGUE if self.descriptor.preload & 0x7F else 0)

    @property
    def kernarg_bytes(self) -> int:
        return int(self.metadata[".kernarg_segment_size"])

    @property
    def lds_bytes(self) -> int:
        return int(self.metadata[".group_segment_fixed_size"])

    @property
    def vgprs(self) -> int:
        return int(self.metadata[".vgpr_count"])

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


def _reachable(first: int, code: CodeObject, name: str) -> list[Printed]:
    """The function's own instructions, or all if it calls others."""
    size = code.elf.symbols.get(name, (0, 0))[1]
    end = code.printed[first].address + size
    own = [printed for printed in code.printed[first:] if size == 0 or printed.address < end]
    if not any(printed.mnemonic in CALLS for printed in own):
        return own
    places = {printed.address for printed in own}
    return own + [printed for printed in code.printed if printed.address not in places]
