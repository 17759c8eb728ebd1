"""Loaded ELF images and their instructions."""

from __future__ import annotations

from tilewright_emulator.code.elf import Elf
from tilewright_emulator.code.listing import disassembly, has_listing
from tilewright_emulator.errors import BadCodeObject, ToolMissing
from tilewright_emulator.isa.arch import BY_MACHINE, Arch
from tilewright_kit.types.errors import InternalError, ToolchainMissingError
from tilewright_tools.analysis.disassembly import Disassembler, Function, parse

MACHINE_MASK = 0xFF
DISASSEMBLER = Disassembler()


def disassembled(image: bytes) -> tuple[Function, ...]:
    """The functions of a code object: by llvm-objdump, or where it is missing by the listing that the object carries.

    Raises ``BadCodeObject``, or ``ToolMissing`` if there is neither.
    """
    try:
        return DISASSEMBLER.disassemble(image)
    except ToolchainMissingError as error:
        elf = Elf(image)
        if not has_listing(elf):
            raise ToolMissing(f"{error}; or compile with a listing (docs/emulator.md)") from error
        return parse(disassembly(elf))
    except InternalError as error:
        raise BadCodeObject(str(error)) from error


class Image:
    """An ELF image: its file, its GPU and its instructions."""

    def __init__(self, image: bytes) -> None:
        self.elf = Elf(image)
        machine = self.elf.flags & MACHINE_MASK
        if machine not in BY_MACHINE:
            raise BadCodeObject(f"ELF machine {machine:#x} is none of {', '.join(a.name for a in BY_MACHINE.values())}")
        self.arch: Arch = BY_MACHINE[machine]
        functions = disassembled(image)
        self.printed = [printed for function in functions for printed in function.instructions]
