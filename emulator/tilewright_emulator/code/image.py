"""Loaded ELF images and their instructions."""

from __future__ import annotations

from tilewright_emulator.code.elf import Elf
from tilewright_emulator.errors import BadCodeObject, ToolMissing
from tilewright_emulator.isa.arch import BY_MACHINE, Arch
from tilewright_kit.types.errors import InternalError, ToolchainMissingError
from tilewright_tools.analysis.disassembly import Disassembler

MACHINE_MASK = 0xFF
DISASSEMBLER = Disassembler()


class Image:
    """An ELF image: its file, its GPU and its instructions."""

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

    @property
    def kernel_names(self) -> list[str]:
        return [entry[".name"] for entry in self.elf.metadata.get("amdhsa.kernels", ())]
