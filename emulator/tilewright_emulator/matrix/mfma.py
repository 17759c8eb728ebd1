"""MFMA: matrix instructions of CDNA2, CDNA3 and CDNA4.

D = A x B + C. Products and sums are those of a float32 matrix product (its order is NumPy's; hardware's is its own and
not documented), then C is added in float32: of float16 and narrower operands the products are exact. Integers are
exact and wrap. The active lanes do not matter. On gfx90a subnormal float16 and bfloat16 operands count as zeros and
subnormal results of these become zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright_emulator.decode.operand_types import selection
from tilewright_emulator.decode.operands import bits32, read_bits
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.matrix import layouts
from tilewright_emulator.matrix.formats import BITS, Unpack, unpacker
from tilewright_emulator.matrix.layouts import Shape
from tilewright_emulator.state.waves import Waves

U32, I32, F32 = np.uint32, np.int32, np.float32
ALL = ("gfx90a", "gfx942", "gfx950")
CDNA2, CDNA3, CDNA4 = ("gfx90a",), ("gfx942", "gfx950"), ("gfx950",)


@dataclass(frozen=True)
class Sheet:
    """One instruction: its shape and the formats of A, B and of C and D."""

    shape: Shape
    a: str
    b: str
    result: str = "f32"


# Operand format -> shapes (M, N, K, blocks), and where they exist. Names follow from them: see _name().
Size = tuple[int, int, int, int]
SHORT: list[tuple[Size, tuple[str, ...]]] = [
    ((32, 32, 4, 2), ALL), ((16, 16, 4, 4), ALL), ((4, 4, 4, 16), ALL), ((32, 32, 8, 1), ALL), ((16, 16, 16, 1), ALL),
    ((32, 32, 16, 1), CDNA4), ((16, 16, 32, 1), CDNA4),
]  # fmt: skip
FIRST: list[tuple[Size, tuple[str, ...]]] = [  # bfloat16 as it was before the 1k forms
    ((32, 32, 2, 2), CDNA2), ((16, 16, 2, 4), CDNA2), ((4, 4, 2, 16), CDNA2), ((32, 32, 4, 1), CDNA2),
    ((16, 16, 8, 1), CDNA2),
]  # fmt: skip
DENSE: dict[str, list[tuple[Size, tuple[str, ...]]]] = {
    "f32": [
        ((32, 32, 1, 2), ALL), ((16, 16, 1, 4), ALL), ((4, 4, 1, 16), ALL),
        ((32, 32, 2, 1), ALL), ((16, 16, 4, 1), ALL),
    ],
    "xf32": [((16, 16, 8, 1), ("gfx942",)), ((32, 32, 4, 1), ("gfx942",))],
    "f16": SHORT,
    "bf16": SHORT + FIRST,
    "i8": [
        ((32, 32, 4, 2), ALL), ((16, 16, 4, 4), ALL), ((4, 4, 4, 16), ALL),
        ((32, 32, 8, 1), CDNA2), ((16, 16, 16, 1), CDNA2),
        ((32, 32, 16, 1), CDNA3), ((16, 16, 32, 1), CDNA3), ((32, 32, 32, 1), CDNA4), ((16, 16, 64, 1), CDNA4),
    ],
    "8": [((32, 32, 16, 1), CDNA3), ((16, 16, 32, 1), CDNA3)],
}  # fmt: skip


def _name(arch: str, m: int, n: int, k: int, blocks: int, kind: str, result: str) -> str:
    """The mnemonic as this architecture's disassembly prints it."""
    size = f"v_mfma_{result}_{m}x{n}x{k}"
    if arch == "gfx90a":
        new_bf16 = kind == "bf16" and (k == 8 if m == 32 and blocks == 1 else k == 16 if blocks == 1 else k == 4)
        return f"{size}{kind}{'_1k' if new_bf16 else ''}"
    return f"{size}{f'_{blocks}b' if blocks > 1 else ''}_{kind}"


def _sheets() -> dict[tuple[str, str], Sheet]:
    """(architecture, mnemonic) -> sheet, of the instructions whose operands have one format each."""
    found: dict[tuple[str, str], Sheet] = {}
    for kind, rows in DENSE.items():
        for (m, n, k, blocks), archs in rows:
            pairs = [(kind, kind)] if kind != "8" else [(a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")]
            for arch in archs:
                for a, b in pairs:
                    result = "i32" if kind == "i8" else "f32"
                    printed = f"{a}_{b}" if kind == "8" else kind
                    name = _name(arch, m, n, k, blocks, printed, result)
                    found[arch, name] = Sheet(Shape(m, n, k, blocks), a, b, result)
    return found


SHEETS = _sheets()
MIXED_FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")  # by the number in cbsz (A) and blgp (B)


# ---- operands ----


def registers(operand: Operand, count: int, instruction: Instruction) -> slice:
    """The rows of an operand's registers. Raises ``UnknownInstruction`` if they are not so many."""
    if operand.kind != "v" or operand.count != count:
        raise UnknownInstruction(f"operand {operand.text}, not {count} vector registers: {instruction.text}")
    return slice(operand.index, operand.index + count)


def read_accumulator(operand: Operand, count: int, dtype: type, instruction: Instruction) -> Callable[[Waves], Array]:
    """C as ``(count, waves, lanes)``, or a constant that broadcasts to it."""
    if operand.kind == "constant":
        value: Array = np.array(bits32(operand), U32).view(dtype)
        return lambda w: value
    rows = registers(operand, count, instruction)
    return lambda w: w.vectors[rows].view(dtype)


def _gather(unpack: Unpack, rows: slice, index: Array) -> Callable[[Waves], Array]:
    """An operand as float32 ``(waves, *index.shape)``."""
    flat = index.reshape(-1)

    def read(w: Waves) -> Array:
        values = unpack(w.vectors[rows])
        return values.reshape(w.count, -1).take(flat, axis=1).reshape(w.count, *index.shape)

    return read


def _refuse_unknown(instruction: Instruction, known: tuple[str, ...]) -> None:
    for name in instruction.modifiers:
        if name not in known:
            raise UnknownInstruction(f"modifier {name}: {instruction.text}")


def _product(
    sheet: Sheet, a: Callable[[Waves], Array], b: Callable[[Waves], Array], instruction: Instruction, arch: Arch
) -> Step:
    """The step, given readers of A ``(waves, blocks, M, K)`` and B ``(waves, blocks, K, N)``."""
    shape = sheet.shape
    dtype = I32 if sheet.result == "i32" else F32
    c = read_accumulator(instruction.operand(3), shape.results, dtype, instruction)
    target = registers(instruction.operand(0), shape.results, instruction)
    places = layouts.mfma_result(shape)
    flat, across = places.reshape(-1), (shape.results, shape.lanes)
    flush = arch.name == "gfx90a" and sheet.a in ("f16", "bf16")

    def step(w: Waves) -> None:
        product = np.matmul(a(w), b(w)).reshape(w.count, -1)
        ordered = product.take(flat, axis=1).reshape(w.count, *across).transpose(1, 0, 2)
        total = ordered.astype(I32) + c(w) if dtype is I32 else ordered + c(w)
        if flush:
            total = np.where(np.abs(total) < F32(2.0**-126), F32(0), total)
        w.vectors[target] = total.view(U32)

    return step


# ---- instructions of one format for each operand ----


@builder(*sorted({name for _, name in SHEETS}))
def mfma(instruction: Instruction, arch: Arch) -> Step:
    sheet = SHEETS.get((arch.name, instruction.name))
    if sheet is None:
        raise UnknownInstruction(f"{arch.name} has no {instruction.name}: {instruction.text}")
    _refuse_unknown(instruction, ("cbsz", "abid", "blgp"))
    shape = sheet.shape
    count_a, count_b = (max(1, shape.held * BITS[kind] // 32) for kind in (sheet.a, sheet.b))
    index = layouts.mfma_operand(shape)
    blocks = layouts.broadcast_blocks(shape.blocks, instruction.number("cbsz"), instruction.number("abid"))
    lanes = layouts.swizzled_lanes(instruction.number("blgp"))
    index_b = lanes[index // shape.held] * shape.held + index % shape.held
    a = _gather(unpacker(arch.name, sheet.a), registers(instruction.operand(1), count_a, instruction), index[blocks])
    b = _gather(
        unpacker(arch.name, sheet.b),
        registers(instruction.operand(2), count_b, instruction),
        np.ascontiguousarray(index_b.transpose(0, 2, 1)),
    )
    return _product(sheet, a, b, instruction, arch)


# ---- gfx950: any of the formats of 8, 6 and 4 bits for each operand, with or without scales ----


def _mixed_operand(instruction: Instruction, position: int, shape: Shape, arch: Arch) -> Callable[[Waves], Array]:
    number = instruction.number("cbsz" if position == 1 else "blgp")
    if number >= len(MIXED_FORMATS):
        raise UnknownInstruction(f"format {number}: {instruction.text}")
    name = MIXED_FORMATS[number]
    bits = BITS[name]
    placed = Shape(shape.m, shape.n, shape.k, run=16 if bits == 8 else 32)
    rows = registers(instruction.operand(position), bits, instruction)
    return _gather(unpacker(arch.name, name), rows, layouts.mfma_operand(placed)[0])


def _scale(instruction: Instruction, position: int, shape: Shape, arch: Arch) -> Callable[[Waves], Array]:
    """Powers of two ``(waves, rows, K / 32)``: lane i + M * block holds row i's, in the byte that op_sel picks."""
    read = read_bits(instruction, instruction.operand(position), -1, arch)
    part = position - 4
    byte = selection(instruction, "op_sel", part, 0) + 2 * selection(instruction, "op_sel_hi", part, 0)
    shift = U32(8 * byte)
    blocks = shape.k // 32
    lane = np.arange(shape.m)[:, None] + shape.m * np.arange(blocks)[None, :]

    def powers(w: Waves) -> Array:
        exponents = ((read(w) >> shift) & U32(0xFF)).astype(I32)
        values = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
        return np.broadcast_to(values, (w.count, 64))[:, lane]

    return powers


def _scaled(read: Callable[[Waves], Array], powers: Callable[[Waves], Array] | None) -> Callable[[Waves], Array]:
    if powers is None:
        return read

    def scaled(w: Waves) -> Array:
        values = read(w)
        by_block = values.reshape(*values.shape[:2], -1, 32) * powers(w)[..., None]
        return np.asarray(by_block.astype(F32).reshape(values.shape))

    return scaled


@builder(
    *(f"v_mfma_{scale}f32_{size}_f8f6f4" for scale in ("", "scale_") for size in ("16x16x128", "32x32x64")),
    archs=CDNA4,
)
def mfma_mixed(instruction: Instruction, arch: Arch) -> Step:
    _refuse_unknown(instruction, ("cbsz", "blgp", "op_sel", "op_sel_hi"))
    match = re.search(r"_(\d+)x(\d+)x(\d+)_", instruction.name)
    assert match is not None
    shape = Shape(int(match[1]), int(match[2]), int(match[3]))
    with_scales = "_scale_" in instruction.name
    scales = [_scale(instruction, position, shape, arch) if with_scales else None for position in (4, 5)]
    rows, columns = (
        _scaled(_mixed_operand(instruction, position, shape, arch), powers)
        for position, powers in zip((1, 2), scales, strict=True)
    )
    sheet = Sheet(shape, "mixed", "mixed")
    return _product(
        sheet, lambda w: rows(w)[:, None], lambda w: columns(w).transpose(0, 2, 1)[:, None], instruction, arch
    )
