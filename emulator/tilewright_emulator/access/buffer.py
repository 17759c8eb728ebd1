"""Buffer instructions: raw buffers, whose resource says where they end. Loads outside give zeros, stores nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tilewright_emulator.access.global_memory import (
    LOADS,
    STORES,
    load_bytes,
    load_to_lds,
    scratch_load,
    scratch_store,
    store_bytes,
)
from tilewright_emulator.access.lds_access import ELEMENTS, from_registers, to_registers
from tilewright_emulator.decode.operands import bits32
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import UnknownInstruction, WaveFault
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand, register_bits
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.isa.scopes import passes_through, reaches_device
from tilewright_emulator.state.waits import Pending, counters_of
from tilewright_emulator.state.waves import Waves

RAW_CHECK, NO_CHECK = 3, 2  # OOB_SELECT of generations 11 and 12


@dataclass(frozen=True)
class Place:
    """The operands that say where: offset register, resource, scalar offset, immediate offset. ``wide``, ``through``:
    the access reaches the device (scopes.py)."""

    vector: Operand
    resource: int
    scalar: Operand
    offset: int
    uses_vector: bool
    arch: Arch
    wide: bool
    through: bool

    @classmethod
    def of(cls, instruction: Instruction, operands: list[Operand], arch: Arch) -> Place:
        if "idxen" in instruction.modifiers:
            raise UnknownInstruction(f"structured buffers are not modelled: {instruction.text}")
        vector, resource, scalar = operands
        offset, uses = instruction.number("offset"), "offen" in instruction.modifiers
        wide = reaches_device(instruction, arch, "store" if "_store_" in instruction.name else "load")
        return cls(vector, resource.index, scalar, offset, uses, arch, wide, passes_through(instruction, arch))

    def is_scratch(self, w: Waves) -> bool:
        """A swizzled resource is private memory of lanes."""
        return bool((w.s_u32[self.resource + 1][0, 0] >> 31) & 1) if self.arch.generation == 9 else False

    def offsets(self, w: Waves) -> Array:
        """Offsets of active lanes from the buffer's base, without the scalar offset, int64."""
        if not self.uses_vector:
            return np.full(int(w.exec.sum()), self.offset, np.int64)
        return w.active(w.u32[self.vector.index]).astype(np.int64) + self.offset

    def soffset(self, w: Waves) -> Array:
        if self.scalar.kind == "s" and self.scalar.text != "null":
            column: Array = w.s_u32[self.scalar.index].astype(np.int64)
            return column
        return np.full((1, 1), bits32(self.scalar) if self.scalar.kind == "constant" else 0, np.int64)

    def resolve(self, w: Waves, offsets: Array, part: int) -> tuple[Array, Array]:
        """Addresses (uint64) of active lanes, and which of them are inside; the range is checked for ``part`` bytes."""
        r = self.resource
        base = w.s_u32[r].astype(np.uint64) | (w.s_u32[r + 1] & np.uint32(0xFFFF)).astype(np.uint64) << np.uint64(32)
        if ((w.s_u32[r + 1] >> np.uint32(16)) & np.uint32(0x3FFF)).any():
            raise WaveFault(UnknownInstruction, 0, "a buffer resource with a stride is not modelled")
        scalar = w.active(self.soffset(w))
        records = w.active(w.s_u32[r + 2].astype(np.int64))
        inside = offsets + scalar + part <= records
        if self.arch.generation >= 11:
            select = w.active(w.s_u32[r + 3] >> np.uint32(28) & np.uint32(3))
            inside = np.where(select == RAW_CHECK, inside, records > 0)
        return w.active(base) + (offsets + scalar).astype(np.uint64), inside

    def load(self, w: Waves, size: int) -> Array:
        """Bytes ``(active lanes, size)``; each dword is inside or outside by itself."""
        offsets, part = self.offsets(w), min(size, 4)
        addresses, inside = self.resolve(w, offsets, size)
        if inside.all():
            return load_bytes(w, addresses, size, self.wide)
        data = np.zeros((offsets.size, size), np.uint8)
        if inside.any():
            data[inside] = load_bytes(w, addresses[inside], size, self.wide)
        for at in range(0, size, part) if size > 4 else ():
            addresses, some = self.resolve(w, offsets + at, part)
            some &= ~inside
            if some.any():
                data[some, at : at + part] = w.run.memory.load(addresses[some], part)
        return data

    def store(self, w: Waves, data: Array) -> Pending:
        """Active lanes write; the result is to be issued."""
        offsets, size = self.offsets(w), data.shape[1]
        addresses, inside = self.resolve(w, offsets, size)
        if inside.all():
            return store_bytes(w, addresses, data, self.wide, self.through)
        owners = w.owners()
        for at in range(0, size, 4):
            part = min(size - at, 4)
            addresses, inside = self.resolve(w, offsets + at, part)
            if inside.any():
                chosen = None if owners is None else owners[inside]
                w.run.memory.store(addresses[inside], np.ascontiguousarray(data[inside, at : at + part]), chosen)
        return Pending("store")


def _element(instruction: Instruction) -> tuple[int, str]:
    return ELEMENTS[re.sub(r"^buffer_(load|store)_(lds_)?", "", instruction.name)]


def _load(instruction: Instruction, arch: Arch) -> Step:
    size, how = _element(instruction)
    printed = [Operand.parse(text) for text in instruction.operands]
    counters = counters_of(arch, "load")
    if "lds" in instruction.modifiers or "_lds_" in instruction.name:
        target = Place.of(instruction, printed[-3:] if len(printed) > 2 else [Operand.parse("off"), *printed], arch)
        offset = instruction.number("offset")

        def direct(w: Waves) -> None:
            if w.full or w.exec.any():
                load_to_lds(w, size, offset, counters, lambda: target.load(w, size))

        return direct
    place = Place.of(instruction, printed[1:4], arch)
    first, registers = printed[0].index, register_bits(printed[0])

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        if place.is_scratch(w):
            scratch_load(w, first, _private(place, w), size, how)
        else:
            to_registers(w, first, place.load(w, size), how)
        w.issue(counters, Pending("load", registers))

    return step


def _private(place: Place, w: Waves) -> Array:
    """Byte offsets in lanes' private memory; the scalar offset of the wave's part is zero here."""
    offsets = np.full((w.count, w.lanes), place.offset, np.int64) + place.soffset(w)
    return offsets + w.u32[place.vector.index] if place.uses_vector else offsets


def _store(instruction: Instruction, arch: Arch) -> Step:
    size, how = _element(instruction)
    printed = [Operand.parse(text) for text in instruction.operands]
    place, first = Place.of(instruction, printed[1:4], arch), printed[0].index
    counters = counters_of(arch, "store")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        if place.is_scratch(w):
            scratch_store(w, first, _private(place, w), size, how)
            w.issue(counters, Pending("store"))
        else:
            w.issue(counters, place.store(w, from_registers(w, first, size, how)))

    return step


builder(*(f"buffer_load_{kind}" for kind in LOADS))(_load)
builder(*(f"buffer_load_lds_{kind}" for kind in ("b32", "u8", "i8", "u16", "i16")), written=0)(_load)
builder(*(f"buffer_store_{kind}" for kind in STORES), written=0)(_store)
