"""WMMA: matrix instructions of RDNA3 and RDNA4 in waves of 32.

D = A x B + C of 16 x 16 x 16. Float products are exact in float32 and summed there (NumPy's order), integers are exact
and wrap, or saturate with clamp. A float16 or bfloat16 result is rounded once at the end. Every lane has to be active,
and on gfx11 both halves of the wave have to hold the same A and the same B.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tilewright_emulator.decode.operand_types import selection
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import EmulationError, UnknownInstruction
from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.matrix import layouts
from tilewright_emulator.matrix.formats import BITS, unpacker
from tilewright_emulator.matrix.mfma import read_accumulator, registers
from tilewright_emulator.state.waves import Waves

U16, U32, I32, F32 = np.uint16, np.uint32, np.int32, np.float32
K = 16
FLOATS = ("f16", "bf16")
EIGHT = tuple(f"{a}_{b}" for a in ("fp8", "bf8") for b in ("fp8", "bf8"))


def _operand(instruction: Instruction, position: int, kind: str, arch: Arch) -> Callable[[Waves], Array]:
    """A or B as float32 ``(waves, 16, K)``."""
    held = K if arch.generation == 11 else K // 2
    rows = registers(instruction.operand(position), held * BITS[kind] // 32, instruction)
    unpack = unpacker(arch.name, kind)
    index = layouts.wmma_operand(arch.generation, K)
    flat = index.reshape(-1)

    def read(w: Waves) -> Array:
        raw = w.vectors[rows]
        if arch.generation == 11 and not np.array_equal(raw[:, :, :16], raw[:, :, 16:]):
            raise EmulationError(f"the halves of the wave hold different operands: {instruction.text}")
        return unpack(raw).reshape(w.count, -1).take(flat, axis=1).reshape(w.count, 16, K)

    return read


def _check(instruction: Instruction, floats: bool) -> None:
    allowed = {"op_sel", "op_sel_hi"} if floats else {"neg_lo", "clamp", "op_sel_hi"}
    for name in set(instruction.modifiers) - allowed:
        raise UnknownInstruction(f"modifier {name}: {instruction.text}")


def _product(instruction: Instruction, arch: Arch, a: str, b: str) -> Callable[[Waves], Array]:
    """A x B as ``(8, waves, lanes)`` in the result's layout."""
    rows, columns = _operand(instruction, 1, a, arch), _operand(instruction, 2, b, arch)
    flat = layouts.wmma_result(arch.generation).reshape(-1)

    def product(w: Waves) -> Array:
        if not w.full:
            raise EmulationError(f"a lane is not active: {instruction.text}")
        result = np.matmul(rows(w), columns(w).transpose(0, 2, 1)).reshape(w.count, -1)
        return np.asarray(result.take(flat, axis=1).reshape(w.count, 8, 32).transpose(1, 0, 2))

    return product


@builder(*(f"v_wmma_f32_16x16x16_{kind}" for kind in (*FLOATS, *EIGHT)))
def wmma(instruction: Instruction, arch: Arch) -> Step:
    _check(instruction, True)
    kinds = instruction.name.removeprefix("v_wmma_f32_16x16x16_").split("_")
    if arch.generation == 11 and len(kinds) == 2:
        raise UnknownInstruction(f"{arch.name} has no 8-bit floats: {instruction.text}")
    product = _product(instruction, arch, kinds[0], kinds[-1])
    c = read_accumulator(instruction.operand(3), 8, F32, instruction)
    target = registers(instruction.operand(0), 8, instruction)

    def step(w: Waves) -> None:
        w.vectors[target] = (product(w) + c(w)).view(U32)

    return step


@builder("v_wmma_i32_16x16x16_iu8")
def wmma_integer(instruction: Instruction, arch: Arch) -> Step:
    """neg_lo says for A and for B whether the bytes are signed."""
    _check(instruction, False)
    a, b = ("i8" if selection(instruction, "neg_lo", part, 0) else "u8" for part in range(2))
    product = _product(instruction, arch, a, b)
    c = read_accumulator(instruction.operand(3), 8, I32, instruction)
    target = registers(instruction.operand(0), 8, instruction)
    clamp = "clamp" in instruction.modifiers

    def step(w: Waves) -> None:
        total = product(w).astype(np.int64) + c(w)
        if clamp:
            total = np.clip(total, -0x80000000, 0x7FFFFFFF)
        w.vectors[target] = total.astype(I32).view(U32)

    return step


@builder("v_wmma_f16_16x16x16_f16", "v_wmma_bf16_16x16x16_bf16")
def wmma_half(instruction: Instruction, arch: Arch) -> Step:
    """gfx11: one result in each of 8 registers, in the half that op_sel says, the other half stays. gfx12: packed."""
    _check(instruction, True)
    match = re.match(r"v_wmma_(b?f16)_", instruction.name)
    assert match is not None
    kind = match[1]
    product = _product(instruction, arch, kind, kind)
    packed = arch.generation == 12
    source, count = instruction.operand(3), 4 if packed else 8
    c = read_accumulator(source, count, U32, instruction)
    target = registers(instruction.operand(0), count, instruction)
    shift = U32(16 if selection(instruction, "op_sel", 2, 0) else 0)
    constant = source.kind == "constant"

    def widened(bits: Array) -> Array:
        return formats.f16(bits).astype(F32) if kind == "f16" else formats.bf16_to_f32(bits & U32(0xFFFF))

    def halves(w: Waves) -> Array:
        """C as float32 ``(8, waves, lanes)``."""
        raw = c(w)
        if constant:
            return np.asarray(raw.view(F32))
        if not packed:
            return np.asarray(widened(raw >> shift))
        both = np.stack([widened(raw), widened(raw >> U32(16))], axis=1)
        return np.asarray(both.reshape(8, *raw.shape[1:]))

    def step(w: Waves) -> None:
        total = product(w) + halves(w)
        bits = formats.bits16(total) if kind == "f16" else formats.f32_to_bf16(total.view(U32))
        if packed:
            w.vectors[target] = bits[0::2] | (bits[1::2] << U32(16))
        else:
            keep = U32(0xFFFF0000) >> shift
            w.vectors[target] = (w.vectors[target] & keep) | (bits << shift)

    return step
