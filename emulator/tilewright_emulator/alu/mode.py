"""Changes of the rounding and subnormal modes: only to what the arithmetic does anyway."""

from __future__ import annotations

from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction

KEPT = {"s_round_mode": 0, "s_denorm_mode": 15}


@builder(*KEPT, written=0)
def set_mode(instruction: Instruction, arch: Arch) -> Step:
    if int(instruction.operands[0], 0) != KEPT[instruction.name]:
        raise UnknownInstruction(f"only rounding to nearest with subnormals is modelled: {instruction.text}")
    return lambda w: None
