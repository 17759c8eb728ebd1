"""Kernels of a code object."""

from __future__ import annotations

from typing import Any

from tilewright_emulator.code.image import Image
from tilewright_emulator.decode.program import CALLS, Program
from tilewright_emulator.decode.steps import parse
from tilewright_emulator.errors import BadCodeObject
from tilewright_emulator.isa.instruction import Instruction
from tilewright_tools.analysis.disassembly import Instruction as Printed

PRELOAD_PROLOGUE = 256
FLOAT_MODE = 0xF0  # rounding to nearest even, subnormals kept: what the arithmetic does


def _read(printed: Printed) -> Instruction:
    return parse(printed.text, printed.address, printed.size, printed.target)


class KernelCode:
    """One kernel: its facts, and its program."""

    def __init__(self, code: Image, name: str) -> None:
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


def _reachable(first: int, code: Image, name: str) -> list[Printed]:
    """The function's own instructions, or all if it calls others."""
    size = code.elf.symbols.get(name, (0, 0))[1]
    end = code.printed[first].address + size
    own = [printed for printed in code.printed[first:] if size == 0 or printed.address < end]
    if not any(printed.mnemonic in CALLS for printed in own):
        return own
    places = {printed.address for printed in own}
    return own + [printed for printed in code.printed if printed.address not in places]
