"""LDS instructions: loads, stores, two-address forms, 16-bit halves, permutes. Atomics are in atomic.py."""

from __future__ import annotations

import re

import numpy as np

from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import UnknownInstruction, WaveFault
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, register_bits
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.run import LdsAccess
from tilewright_emulator.state.traffic import count_lds
from tilewright_emulator.state.waits import Pending, counters_of
from tilewright_emulator.state.waves import Waves

# Name of the element: bytes, and what happens to it on its way to a register.
ELEMENTS = {
    "u8": (1, ""), "i8": (1, "sign"), "u16": (2, ""), "i16": (2, "sign"), "b8": (1, ""), "b16": (2, ""),
    "b32": (4, ""), "b64": (8, ""), "b96": (12, ""), "b128": (16, ""),
    "u8_d16": (1, "low"), "u8_d16_hi": (1, "high"), "i8_d16": (1, "sign low"), "i8_d16_hi": (1, "sign high"),
    "u16_d16": (2, "low"), "u16_d16_hi": (2, "high"), "b8_d16_hi": (1, "high"), "b16_d16_hi": (2, "high"),
    "d16_u8": (1, "low"), "d16_hi_u8": (1, "high"), "d16_i8": (1, "sign low"), "d16_hi_i8": (1, "sign high"),
    "d16_b16": (2, "low"), "d16_hi_b16": (2, "high"), "d16_hi_b8": (1, "high"),
    "ubyte": (1, ""), "sbyte": (1, "sign"), "ushort": (2, ""), "sshort": (2, "sign"), "byte": (1, ""), "short": (2, ""),
    "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
    "ubyte_d16": (1, "low"), "ubyte_d16_hi": (1, "high"), "sbyte_d16": (1, "sign low"),
    "sbyte_d16_hi": (1, "sign high"),
    "short_d16": (2, "low"), "short_d16_hi": (2, "high"), "byte_d16_hi": (1, "high"),
}  # fmt: skip


def to_registers(w: Waves, first: int, data: Array, how: str) -> None:
    """Loaded bytes, ``(active lanes, size)``, to registers: widened, or into one half of a register."""
    size = data.shape[1]
    if size >= 4:
        w.load_registers(first, data)
        return
    small = data.view(np.uint8 if size == 1 else np.uint16).reshape(-1)
    if "sign" in how:
        wide = small.view(np.int8 if size == 1 else np.int16).astype(np.int32).view(np.uint32)
    else:
        wide = small.astype(np.uint32)
    if "low" in how or "high" in how:
        old = w.active(w.u32[first])
        if "low" in how:
            wide = (old & np.uint32(0xFFFF0000)) | (wide & np.uint32(0xFFFF))
        else:
            wide = (old & np.uint32(0xFFFF)) | (wide << np.uint32(16))
    w.load_registers(first, np.ascontiguousarray(wide)[:, None].view(np.uint8))


def from_registers(w: Waves, first: int, size: int, how: str) -> Array:
    """The bytes to store, ``(active lanes, size)``."""
    data = w.stored_registers(first, -(-size // 4))
    if size >= 4:
        return data
    return data[:, 2 : 2 + size] if "high" in how else data[:, :size]


def lds_load(w: Waves, addresses: Array, size: int) -> tuple[Array, Array]:
    """Bytes at active lanes' addresses (int64, within the workgroup's LDS), and their places in the image."""
    lds = w.run.lds
    lds.check(addresses, size)
    places = addresses + w.active(w.bases)
    lds.note_read(places, size, w.active(w.marks))
    return lds.gather(places, size), places


def lds_store(w: Waves, addresses: Array, data: Array) -> Array:
    lds, size = w.run.lds, data.shape[1]
    lds.check(addresses, size)
    places = addresses + w.active(w.bases)
    lds.note_write(places, size, w.active(w.marks))
    lds.scatter(places, data)
    return places


def _all_again(marks: list[LdsAccess], waves: Array) -> None:
    for mark in marks:
        mark.again(waves)


def lds_pending(
    w: Waves, counters: tuple[str, ...], registers: int, accesses: list[tuple[Array, int]], writes: bool
) -> None:
    """Notes LDS accesses under way."""
    owners = w.active(w.ids[:, None])
    marks = [LdsAccess(w.run, places, size, owners, writes) for places, size in accesses]
    pending = Pending("lds", registers, lambda waves: _all_again(marks, waves))
    if w.signalled:
        w.since_signal.append(pending)
    w.issue(counters, pending)


def _addresses(w: Waves, register: int, offset: int) -> Array:
    # 32-bit sums: LLVM gives an instruction bases below zero with offsets beyond them.
    return (w.active(w.u32[register]).astype(np.int64) + offset) & 0xFFFFFFFF


def _load(instruction: Instruction, arch: Arch) -> Step:
    element = re.sub(r"^ds_(read|load)_", "", instruction.name)
    size, how = ELEMENTS[element]
    first, address = instruction.operand(0).index, instruction.operand(1).index
    offset, registers = instruction.number("offset"), register_bits(instruction.operand(0))
    counters = counters_of(arch, "lds")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        addresses = _addresses(w, address, offset)
        data, places = lds_load(w, addresses, size)
        to_registers(w, first, data, how)
        lds_pending(w, counters, registers, [(places, size)], False)
        if w.run.checks.traffic:
            count_lds(w, addresses, size, reads=True)

    return step


def _load_turned(instruction: Instruction, arch: Arch) -> Step:
    """Four elements of 16 bits a lane, exchanged among 16 lanes: of element e of lane l are those of its own number
    modulo 4 of lane l / 4 + 4 e. ("CDNA4 Instruction Set Architecture", MFMA Transpose Load from LDS.)
    """
    first, address = instruction.operand(0).index, instruction.operand(1).index
    offset, registers = instruction.number("offset"), register_bits(instruction.operand(0))
    counters, lanes = counters_of(arch, "lds"), np.arange(16)

    def step(w: Waves) -> None:
        if not w.full and not w.exec.all():
            raise WaveFault(UnknownInstruction, 0, "transposing reads by some lanes of a wave alone are undefined")
        addresses = _addresses(w, address, offset)
        data, places = lds_load(w, addresses, 8)
        blocks = data.view(np.uint16).reshape(-1, 16, 4)
        turned = blocks[:, lanes[:, None] // 4 + 4 * np.arange(4), lanes[:, None] % 4]
        w.load_registers(first, np.ascontiguousarray(turned).reshape(-1, 4).view(np.uint8))
        lds_pending(w, counters, registers, [(places, 8)], False)
        if w.run.checks.traffic:
            count_lds(w, addresses, 8, reads=True)

    return step


def _store(instruction: Instruction, arch: Arch) -> Step:
    size, how = ELEMENTS[re.sub(r"^ds_(write|store)_", "", instruction.name)]
    address, first = instruction.operand(0).index, instruction.operand(1).index
    offset, counters = instruction.number("offset"), counters_of(arch, "lds")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        addresses = _addresses(w, address, offset)
        places = lds_store(w, addresses, from_registers(w, first, size, how))
        lds_pending(w, counters, 0, [(places, size)], True)
        if w.run.checks.traffic:
            count_lds(w, addresses, size, reads=False)

    return step


def _two_offsets(instruction: Instruction, size: int) -> tuple[int, int]:
    unit = size * (64 if "st64" in instruction.name or "stride64" in instruction.name else 1)
    return instruction.number("offset0") * unit, instruction.number("offset1") * unit


def _load_two(instruction: Instruction, arch: Arch) -> Step:
    size = 8 if instruction.name.endswith("64") else 4
    first, address = instruction.operand(0).index, instruction.operand(1).index
    offsets, registers = _two_offsets(instruction, size), register_bits(instruction.operand(0))
    counters = counters_of(arch, "lds")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        bases = [_addresses(w, address, offset) for offset in offsets]
        found = [lds_load(w, addresses, size) for addresses in bases]
        for half, (data, _) in enumerate(found):
            w.load_registers(first + half * size // 4, data)
        lds_pending(w, counters, registers, [(places, size) for _, places in found], False)
        if w.run.checks.traffic:
            for addresses in bases:
                count_lds(w, addresses, size, reads=True)

    return step


def _store_two(instruction: Instruction, arch: Arch) -> Step:
    size = 8 if instruction.name.endswith("64") else 4
    address = instruction.operand(0).index
    sources = (instruction.operand(1).index, instruction.operand(2).index)
    offsets, counters = _two_offsets(instruction, size), counters_of(arch, "lds")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        touched = []
        for offset, source in zip(offsets, sources, strict=True):
            addresses = _addresses(w, address, offset)
            touched.append((lds_store(w, addresses, w.stored_registers(source, size // 4)), size))
            if w.run.checks.traffic:
                count_lds(w, addresses, size, reads=False)
        lds_pending(w, counters, 0, touched, True)

    return step


def _permute(instruction: Instruction, arch: Arch) -> Step:
    """Lanes exchange values through the LDS crossbar; no LDS is touched."""
    first, address, source = (instruction.operand(i).index for i in range(3))
    offset, registers = instruction.number("offset"), register_bits(instruction.operand(0))
    counters, forward = counters_of(arch, "lds"), instruction.name == "ds_permute_b32"

    def step(w: Waves) -> None:
        lane = ((w.u32[address].astype(np.int64) + offset) >> 2) & (w.lanes - 1)
        values = np.where(w.exec, w.u32[source], np.uint32(0))  # inactive lanes give zero
        if forward:
            result = np.zeros_like(values)
            for at in range(w.lanes):  # later lanes win
                rows = np.flatnonzero(w.exec[:, at])
                result[rows, lane[rows, at]] = values[rows, at]
        else:
            result = np.take_along_axis(values, lane, axis=1)
        np.copyto(w.u32[first], result, where=w.exec)
        w.issue(counters, Pending("lds", registers))

    return step


def _swizzle(instruction: Instruction, arch: Arch) -> Step:
    first, source = instruction.operand(0).index, instruction.operand(1).index
    text, lane = instruction.modifiers.get("offset", "0"), np.arange(arch.lanes)
    registers, counters = register_bits(instruction.operand(0)), counters_of(arch, "lds")
    if match := re.match(r"swizzle\(BITMASK_PERM,\s*\"([01pi]{5})\"\)", text):
        low = [{"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}[letter] for letter in match[1]]
        keep, fill, flip = (int("".join(str(bit[i]) for bit in low), 2) for i in range(3))
        index = lane & ~31 | ((lane & 31) & keep | fill) ^ flip
    elif match := re.match(r"swizzle\(QUAD_PERM,(.*)\)", text):
        index = lane & ~3 | np.array([int(part) for part in match[1].split(",")])[lane & 3]
    elif match := re.match(r"swizzle\((SWAP|REVERSE),(\d+)\)", text):
        width = int(match[2])
        index = lane ^ (width if match[1] == "SWAP" else width - 1)
    elif match := re.match(r"swizzle\(BROADCAST,(\d+),(\d+)\)", text):
        index = lane & ~(int(match[1]) - 1) | int(match[2])
    else:
        code = int(text, 0)
        if code >> 15:
            index = lane & ~3 | np.array([code >> 2 * i & 3 for i in range(4)])[lane & 3]
        else:
            index = lane & ~31 | ((lane & 31) & (code & 31) | (code >> 5 & 31)) ^ (code >> 10 & 31)

    def step(w: Waves) -> None:
        values = np.where(w.exec, w.u32[source], np.uint32(0))
        np.copyto(w.u32[first], values[:, index], where=w.exec)
        w.issue(counters, Pending("lds", registers))

    return step


LOADS = (
    "u8",
    "i8",
    "u16",
    "i16",
    "b32",
    "b64",
    "b96",
    "b128",
    "u8_d16",
    "u8_d16_hi",
    "i8_d16",
    "i8_d16_hi",
    "u16_d16",
    "u16_d16_hi",
)
STORES = ("b8", "b16", "b32", "b64", "b96", "b128", "b8_d16_hi", "b16_d16_hi")
builder(*(f"ds_{verb}_{kind}" for verb in ("read", "load") for kind in LOADS))(_load)
builder(*(f"ds_{verb}_{kind}" for verb in ("write", "store") for kind in STORES), written=0)(_store)
builder(
    "ds_read2_b32", "ds_read2_b64", "ds_read2st64_b32", "ds_read2st64_b64", "ds_load_2addr_b32", "ds_load_2addr_b64",
    "ds_load_2addr_stride64_b32", "ds_load_2addr_stride64_b64",
)(_load_two)  # fmt: skip
builder(
    "ds_write2_b32", "ds_write2_b64", "ds_write2st64_b32", "ds_write2st64_b64", "ds_store_2addr_b32",
    "ds_store_2addr_b64", "ds_store_2addr_stride64_b32", "ds_store_2addr_stride64_b64", written=0,
)(_store_two)  # fmt: skip
builder("ds_read_b64_tr_b16")(_load_turned)
builder("ds_bpermute_b32", "ds_permute_b32")(_permute)
builder("ds_swizzle_b32")(_swizzle)
