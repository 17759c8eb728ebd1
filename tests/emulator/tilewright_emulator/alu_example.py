"""A few instructions, as a pattern for the rest; see README.md."""

from __future__ import annotations

import numpy as np

from .arch import Arch
from .instruction import Instruction
from .operands import read_bits, write_bits
from .registry import Step, builder, semantic
from .state import Array, Waves

semantic("v_add_u32", "v_add_nc_u32", src="u32 u32")(np.add)
semantic("v_add_f32", dst="f32", src="f32 f32")(np.add)


@semantic("v_mov_b32", src="u32")
def move(a: Array) -> Array:
    return a


@semantic("s_add_u32", "s_add_co_u32", dst="u32 scc", src="u32 u32")
def scalar_add(a: Array, b: Array) -> tuple[Array, Array]:
    result = a + b
    return result, result < a


@builder("v_readfirstlane_b32")
def read_first_lane(instruction: Instruction, arch: Arch) -> Step:
    read = read_bits(instruction, instruction.operand(1), 0, arch)
    write = write_bits(instruction, instruction.operand(0), arch)

    def step(w: Waves) -> None:
        first = np.argmax(w.exec, axis=1)[:, None]  # lane 0 if no lane is active
        write(w, np.take_along_axis(np.broadcast_to(read(w), w.exec.shape), first, axis=1))

    return step
