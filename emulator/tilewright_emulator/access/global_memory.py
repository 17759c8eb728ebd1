"""Global, flat and scratch instructions: loads, stores, and loads straight into LDS."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tilewright_emulator.access.lds_access import ELEMENTS, from_registers, lds_load, lds_store, to_registers
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import LaneFault, OutOfBounds, UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand, register_bits
from tilewright_emulator.isa.registers import M0, Array
from tilewright_emulator.isa.scopes import passes_through, reaches_device
from tilewright_emulator.state.run import LdsAccess
from tilewright_emulator.state.traffic import count_global
from tilewright_emulator.state.waits import Pending, counters_of
from tilewright_emulator.state.waves import Waves

Addresses = Callable[[Waves], Array]
MASK64 = 0xFFFFFFFFFFFFFFFF
SHARED_APERTURE, PRIVATE_APERTURE = 0x0001_0000, 0x0002_0000  # high words of flat addresses of LDS and scratch


def global_addresses(vector: Operand, scalar: Operand | None, offset: int) -> Addresses:
    """64-bit addresses ``(waves, lanes)``: a vector pair, or a scalar pair with 32-bit vector offsets."""
    displacement = np.uint64(offset & MASK64)
    first = vector.index
    if scalar is None or scalar.kind == "off" or scalar.text == "null":

        def pairs(w: Waves) -> Array:
            wide = w.u32[first + 1].astype(np.uint64)
            wide <<= np.uint64(32)
            wide |= w.u32[first]
            wide += displacement
            return wide

        return pairs
    base = scalar.index >> 1
    if vector.kind == "off":
        return lambda w: w.s_u64[base] + displacement
    return lambda w: (w.s_u64[base] + displacement) + w.u32[first]


def load_bytes(w: Waves, addresses: Array, size: int, wide: bool) -> Array:
    """Data that active lanes read. ``addresses``: uint64 ``(active lanes,)``. ``wide``: the load reaches the device."""
    if w.run.checks.traffic:
        count_global(w, addresses, size)
    if w.run.publication is not None and addresses.size == int(w.exec.sum()):
        w.run.publication.loaded(w, addresses, size, wide)
    data = w.run.memory.load(addresses, size)
    if w.run.weak is not None and addresses.size == int(w.exec.sum()):
        data = w.run.weak.loaded(w, addresses, data, wide)
    return data


def store_bytes(w: Waves, addresses: Array, data: Array, wide: bool, through: bool) -> Pending:
    """Active lanes write; the result is to be issued. ``wide``: the store reaches the device by the rules of scopes.py;
    ``through``: it does so in fact."""
    if w.run.checks.traffic:
        count_global(w, addresses, data.shape[1])
    run, size = w.run, data.shape[1]
    arrived = None if run.weak is None else run.weak.storing(w, addresses, size, through)
    run.memory.store(addresses, data, w.owners())
    published = None if run.publication is None else run.publication.stored(w, addresses, size, wide)
    if arrived is None or published is None:
        return Pending("store", 0, None, arrived or published)
    both = (arrived, published)
    return Pending("store", 0, None, lambda waves: [landed(waves) for landed in both])


def aperture_of(addresses: Array) -> int | None:
    """For flat accesses: the aperture that all lanes' addresses lie in, if any."""
    high = addresses >> np.uint64(32)
    for aperture in (SHARED_APERTURE, PRIVATE_APERTURE):
        inside = high == np.uint64(aperture)
        if inside.all():
            return aperture
        if inside.any():
            raise LaneFault(OutOfBounds, int(np.argmax(inside)), "a flat access is partly to LDS or scratch")
    return None


def load_to_lds(
    w: Waves, size: int, offset: int, counters: tuple[str, ...], load: Callable[[], Array], first: int = 0
) -> None:
    """Data of active lanes straight to LDS at M0 + offset + lane * element; ready when waited for.

    ``load`` gives uint8 ``(active lanes, size)``. Elements shorter than four bytes take four.
    """
    unit = max(size, 4)
    lanes = np.arange(w.lanes, dtype=np.int64) * unit
    within = w.active(w.s_u32[M0].astype(np.int64) + offset + lanes)
    data = load()
    if size < 4:
        data = np.pad(data, ((0, 0), (0, 4 - size)))
    lds = w.run.lds
    lds.check(within, unit)
    places = within + w.active(w.bases)
    lds.note_flight(places, unit, w.active(w.marks))
    lds.scatter(places, data)
    access = LdsAccess(w.run, places, unit, w.active(w.ids[:, None]), True, direct=True)
    w.issue(counters, Pending("direct", 0, None, access.landed))


def _space(instruction: Instruction) -> str:
    return instruction.name.partition("_")[0]


def _element(instruction: Instruction) -> tuple[int, str]:
    return ELEMENTS[re.sub(r"^\w+?_(load|store)_(lds_)?", "", instruction.name)]


def _load(instruction: Instruction, arch: Arch) -> Step:
    size, how = _element(instruction)
    printed = [Operand.parse(text) for text in instruction.operands]
    flat = _space(instruction) == "flat"
    address = global_addresses(printed[1], printed[2] if len(printed) > 2 else None, instruction.number("offset"))
    first, registers = printed[0].index, register_bits(printed[0])
    counters = counters_of(arch, "flat_load" if flat else "load")
    wide = reaches_device(instruction, arch, "load")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        where = w.active(address(w))
        if flat and (aperture := aperture_of(where)) is not None:
            if aperture != SHARED_APERTURE:
                raise LaneFault(UnknownInstruction, 0, "flat access to scratch")
            data, _ = lds_load(w, (where & np.uint64(0xFFFFFFFF)).astype(np.int64), size)
        else:
            data = load_bytes(w, where, size, wide)
        to_registers(w, first, data, how)
        w.issue(counters, Pending("load", registers))

    return step


def _store(instruction: Instruction, arch: Arch) -> Step:
    size, how = _element(instruction)
    printed = [Operand.parse(text) for text in instruction.operands]
    flat = _space(instruction) == "flat"
    address = global_addresses(printed[0], printed[2] if len(printed) > 2 else None, instruction.number("offset"))
    first, counters = printed[1].index, counters_of(arch, "flat_store" if flat else "store")
    wide, through = reaches_device(instruction, arch, "store"), passes_through(instruction, arch)

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        where, data = w.active(address(w)), from_registers(w, first, size, how)
        pending = Pending("store")
        if flat and (aperture := aperture_of(where)) is not None:
            if aperture != SHARED_APERTURE:
                raise LaneFault(UnknownInstruction, 0, "flat access to scratch")
            lds_store(w, (where & np.uint64(0xFFFFFFFF)).astype(np.int64), data)
        else:
            pending = store_bytes(w, where, data, wide, through)
        w.issue(counters, pending)

    return step


def _load_lds(instruction: Instruction, arch: Arch) -> Step:
    size, _ = _element(instruction)
    printed = [Operand.parse(text) for text in instruction.operands]
    offset = instruction.number("offset")
    address = global_addresses(printed[0], printed[1] if len(printed) > 1 else None, offset)
    counters, wide = counters_of(arch, "load"), reaches_device(instruction, arch, "load")

    def step(w: Waves) -> None:
        if w.full or w.exec.any():
            load_to_lds(w, size, offset, counters, lambda: load_bytes(w, w.active(address(w)), size, wide))

    return step


# ---- scratch: words of each lane, at byte offsets ----


def _scratch_offsets(vector: Operand, scalar: Operand | None, offset: int) -> Callable[[Waves], Array]:
    def offsets(w: Waves) -> Array:
        total = np.full((w.count, w.lanes), offset, np.int64)
        if vector.kind == "v":
            total += w.u32[vector.index]
        if scalar is not None and scalar.kind == "s" and scalar.text != "null":
            total += w.s_u32[scalar.index]
        return total

    return offsets


def scratch_view(w: Waves, offsets: Array, size: int) -> tuple[Array, Array]:
    """Word indices ``(words, waves, lanes)`` of an access, and the lanes that make it."""
    wrong = w.exec & ((offsets < 0) | (offsets + size > 4 * w.private.shape[0]) | (offsets % min(size, 4) != 0))
    if wrong.any():
        place = int(offsets[wrong][0])
        lane = int(np.argmax(wrong[w.exec]))
        raise LaneFault(OutOfBounds, lane, f"{size} bytes at {place} of {4 * w.private.shape[0]} of scratch")
    words = -(-size // 4)
    return (np.where(w.exec, offsets, 0) >> 2)[None] + np.arange(words)[:, None, None], w.exec


def scratch_load(w: Waves, first: int, offsets: Array, size: int, how: str) -> None:
    index, _ = scratch_view(w, offsets, size)
    words = np.take_along_axis(w.private, index, axis=0)[:, w.exec].T
    data = np.ascontiguousarray(words).view(np.uint8)
    if size < 4:
        at = (w.active(offsets) & 3)[:, None] + np.arange(size)
        data = np.ascontiguousarray(np.take_along_axis(data, at, axis=1))
    to_registers(w, first, data, how)


def scratch_store(w: Waves, first: int, offsets: Array, size: int, how: str) -> None:
    index, lanes = scratch_view(w, offsets, size)
    for word in range(index.shape[0]):
        if size >= 4:
            value = w.u32[first + word]
        else:
            old = np.take_along_axis(w.private, index[:1], axis=0)[0]
            shift = ((np.where(w.exec, offsets, 0) & 3) * 8).astype(np.uint32)
            mask = np.uint32((1 << 8 * size) - 1)
            new = w.u32[first] >> np.uint32(16 if "high" in how else 0)
            value = (old & ~(mask << shift)) | ((new & mask) << shift)
        rows, columns = np.nonzero(lanes)
        w.private[index[word][lanes], rows, columns] = value[lanes]


def _scratch(instruction: Instruction, arch: Arch) -> Step:
    size, how = _element(instruction)
    printed = [Operand.parse(text) for text in instruction.operands]
    loads = "_load_" in instruction.name
    data, vector = (printed[0], printed[1]) if loads else (printed[1], printed[0])
    offsets = _scratch_offsets(vector, printed[2] if len(printed) > 2 else None, instruction.number("offset"))
    counters = counters_of(arch, "load" if loads else "store")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        (scratch_load if loads else scratch_store)(w, data.index, offsets(w), size, how)
        w.issue(counters, Pending("load", register_bits(data)) if loads else Pending("store"))

    return step


LOADS = (
    "ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4", "u8", "i8", "u16", "i16", "b32",
    "b64", "b96", "b128", "ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi", "short_d16", "short_d16_hi",
    "d16_u8", "d16_hi_u8", "d16_i8", "d16_hi_i8", "d16_b16", "d16_hi_b16",
)  # fmt: skip
STORES = (
    "byte", "byte_d16_hi", "short", "short_d16_hi", "dword", "dwordx2", "dwordx3", "dwordx4", "b8", "b16", "b32", "b64",
    "b96", "b128", "d16_hi_b8", "d16_hi_b16",
)  # fmt: skip
LDS_LOADS = ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx3", "dwordx4")
builder(*(f"{space}_load_{kind}" for space in ("global", "flat") for kind in LOADS))(_load)
builder(*(f"{space}_store_{kind}" for space in ("global", "flat") for kind in STORES), written=0)(_store)
builder(*(f"global_load_lds_{kind}" for kind in LDS_LOADS), written=0)(_load_lds)
builder(*(f"scratch_load_{kind}" for kind in LOADS))(_scratch)
builder(*(f"scratch_store_{kind}" for kind in STORES), written=0)(_scratch)
