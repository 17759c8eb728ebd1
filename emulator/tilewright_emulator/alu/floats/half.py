"""float16 arithmetic, packed and mixed; bfloat16 where it exists.

A sum or product of two float16 is exact in float32 or rounds there to a number that rounds on to the right float16
(24 bits are twice 11 and two), so NumPy's own float16 arithmetic is right. A fused multiply-add is not such a case.
"""

from __future__ import annotations

import numpy as np

from tilewright_emulator.decode.modifiers import only, wrap_function
from tilewright_emulator.decode.operands import TYPES, read_bits, write_bits
from tilewright_emulator.decode.registry import Step, builder, semantic
from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

U16, U32, F16, F32 = np.uint16, np.uint32, np.float16, np.float32


for _name, _ufunc in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
    semantic(f"v_{_name}_f16", dst="f16", src="f16 f16")(_ufunc)
    semantic(f"s_{_name}_f16", dst="f16", src="f16 f16")(_ufunc)
    if _name != "sub":
        semantic(f"v_pk_{_name}_f16", dst="pk_f16", src="pk_f16 pk_f16")(_ufunc)


@semantic("v_subrev_f16", dst="f16", src="f16 f16")
def subtract_reversed(a: Array, b: Array) -> Array:
    return np.asarray(b - a)


@semantic("v_fma_f16", "v_fmamk_f16", "v_fmaak_f16", "v_fma_legacy_f16", dst="f16", src="f16 f16 f16")
@semantic("v_fmac_f16", "s_fmac_f16", dst="f16", src="f16 f16 dst:f16")
@semantic("v_pk_fma_f16", dst="pk_f16", src="pk_f16 pk_f16 pk_f16")
@semantic("v_pk_fmac_f16", dst="pk_f16", src="pk_f16 pk_f16 dst:pk_f16")
def fma(a: Array, b: Array, c: Array) -> Array:
    return formats.fma16(a, b, c)


# ---- mixed: float32 or float16 sources, computed in float32 ----


@semantic("v_fma_mix_f32", "v_mad_mix_f32", dst="f32", src="mix mix mix")
def fma_mixed(a: Array, b: Array, c: Array) -> Array:
    return formats.fma32(a, b, c)


@builder("v_fma_mixlo_f16", "v_fma_mixhi_f16", "v_mad_mixlo_f16", "v_mad_mixhi_f16")
def fma_mixed_half(instruction: Instruction, arch: Arch) -> Step:
    """The float32 result, rounded on to float16, goes to one half; the other half stays."""
    only(instruction, "clamp", "op_sel", "op_sel_hi")
    sources = [TYPES["mix"].reader(instruction, instruction.operand(i + 1), i, arch) for i in range(3)]
    target = instruction.operand(0)
    write, index = write_bits(instruction, target, arch), target.index
    shift = U32(16 if "mixhi" in instruction.name else 0)
    keep = U32(0xFFFF << (16 - int(shift)))

    def halved(a: Array, b: Array, c: Array) -> Array:
        return np.asarray(formats.fma32(a, b, c).astype(F16))

    function = wrap_function(halved, instruction, ("f16",), arch)

    def step(w: Waves) -> None:
        value = function(*[read(w) for read in sources]).view(U16).astype(U32)
        write(w, (w.u32[index] & keep) | (value << shift))

    return step


# ---- dot products of two halves ----


@semantic("v_dot2_f32_f16", dst="f32", src="pk_f16 pk_f16 f32")
@semantic("v_dot2c_f32_f16", "v_dot2acc_f32_f16", dst="f32", src="pk_f16 pk_f16 dst:f32")
def dot2(a: Array, b: Array, c: Array) -> Array:
    """Both products exact, added to the sum in float64, rounded once: within the accuracy that the ISA states."""
    products = a.astype(np.float64) * b.astype(np.float64)
    return np.asarray((products[0] + products[1] + c).astype(F32))


@builder("v_dot2_f32_bf16", "v_dot2c_f32_bf16")
def dot2_bf16(instruction: Instruction, arch: Arch) -> Step:
    """The same of bfloat16 pairs (operands as printed, without op_sel)."""
    only(instruction)
    accumulate = instruction.name == "v_dot2c_f32_bf16"
    a, b = (read_bits(instruction, instruction.operand(i), i - 1, arch) for i in (1, 2))
    c = TYPES["f32"].reader(instruction, instruction.operand(0 if accumulate else 3), -1 if accumulate else 2, arch)
    write = write_bits(instruction, instruction.operand(0), arch)
    high = U32(0xFFFF0000)

    def step(w: Waves) -> None:
        x, y = a(w), b(w)
        low = formats.bf16_to_f32(x).astype(np.float64) * formats.bf16_to_f32(y)
        upper = (x & high).view(F32).astype(np.float64) * (y & high).view(F32)
        write(w, (low + upper + c(w)).astype(F32))

    return step
