"""Scalar loads, and what else the scalar cache does."""

from __future__ import annotations

import numpy as np

from tilewright_emulator.decode.operands import bits32
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import LaneFault, Misaligned, WaveFault
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand, register_bits
from tilewright_emulator.isa.registers import EXEC, NULL, Array
from tilewright_emulator.isa.scopes import invalidates, writes_back
from tilewright_emulator.state.waits import Kind, Pending, counters_of
from tilewright_emulator.state.waves import Waves

WORDS = {
    "dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16,
    "b32": 1, "b64": 2, "b96": 3, "b128": 4, "b256": 8, "b512": 16,
}  # fmt: skip
NARROW = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}


def _offset(printed: list[Operand], instruction: Instruction) -> tuple[int | None, int]:
    """The register that holds an offset, if one does, and the constant part."""
    constant = instruction.number("offset")
    if len(printed) < 3:
        return None, constant
    if printed[2].kind == "constant":
        value = bits32(printed[2])
        return None, constant + (value - (1 << 32) if value >> 31 else value)
    return (None if printed[2].index >= NULL else printed[2].index), constant


def _load(instruction: Instruction, arch: Arch) -> Step:
    kind = instruction.name.rpartition("_")[2]
    buffer = "buffer" in instruction.name
    printed = [Operand.parse(text) for text in instruction.operands]
    target, base = printed[0].index, printed[1].index
    size = 4 * WORDS[kind] if kind in WORDS else np.dtype(NARROW[kind]).itemsize
    register, constant = _offset(printed, instruction)
    pending = register_bits(printed[0])
    counters = counters_of(arch, "scalar")

    def step(w: Waves) -> None:
        offset = np.full((w.count, 1), constant, np.int64)
        if register is not None:
            offset += w.s_u32[register]
        start = w.s_u64[base >> 1]
        if buffer:
            start = start & np.uint64(0xFFFFFFFFFFFF)
        addresses = (start + offset.astype(np.uint64))[:, 0]
        if size >= 4 and (addresses & np.uint64(3)).any():
            raise WaveFault(Misaligned, 0, f"scalar load at {int(addresses[0]):#x}")
        try:
            data = _limited(w, base, offset, addresses, size) if buffer else w.run.memory.load(addresses, size)
        except LaneFault as fault:
            raise WaveFault(fault.kind, fault.lane, fault.message) from None
        if kind in NARROW:
            w.s_u32[target][:, 0] = data.view(NARROW[kind])[:, 0].astype(np.int64).astype(np.uint32)
        elif target < NULL:
            w.scalars[:, target : target + size // 4] = data.view(np.uint32)
        if target <= EXEC < target + size // 4:
            w.sync_exec()
        w.issue(counters, Pending("scalar", pending))

    return step


def _limited(w: Waves, resource: int, offset: Array, addresses: Array, size: int) -> Array:
    """A scalar load from a buffer: dwords past its end are zero."""
    data = np.zeros((w.count, size), np.uint8)
    records = w.s_u32[resource + 2].astype(np.int64)
    for at in range(0, size, 4):
        inside = (offset + at + min(size, 4) <= records)[:, 0]
        if inside.any():
            data[inside, at : at + 4] = w.run.memory.load(addresses[inside] + np.uint64(at), min(size, 4))
    return data


def _clock(instruction: Instruction, arch: Arch) -> Step:
    """Times: they grow, and mean nothing."""
    target, counters = instruction.operand(0), counters_of(arch, "scalar")

    def step(w: Waves) -> None:
        w.run.clock += 100
        w.s_u64[target.index >> 1][...] = w.run.clock
        w.issue(counters, Pending("scalar", register_bits(target)))

    return step


builder(*(f"s_load_{kind}" for kind in (*WORDS, *NARROW)))(_load)
builder(*(f"s_buffer_load_{kind}" for kind in (*WORDS, *NARROW)))(_load)
builder("s_memtime", "s_memrealtime")(_clock)


@builder(
    "s_dcache_inv", "s_dcache_wb", "s_icache_inv", "s_gl1_inv", "buffer_wbl2", "buffer_inv", "buffer_wbinvl1",
    "buffer_wbinvl1_vol", "buffer_invl2", "buffer_gl0_inv", "buffer_gl1_inv", "global_inv", "global_wb", "global_wbinv",
    "s_prefetch_data", "s_prefetch_inst", "global_prefetch_b8", written=0,
)  # fmt: skip
def _caches(instruction: Instruction, arch: Arch) -> Step:
    """There are no caches here; their instructions count as loads or stores that may be waited for, and publish."""
    name, back, fresh = instruction.name, writes_back(instruction), invalidates(instruction)
    kind: Kind = "store" if name.startswith(("buffer_wb", "global_wb")) else "load"
    waited = kind == "store" or name in ("buffer_inv", "buffer_invl2", "global_inv")
    counters = counters_of(arch, kind) if waited else ()

    def step(w: Waves) -> None:
        for memory in (w.run.publication, w.run.weak):
            if memory is not None and back:
                memory.wrote_back(w)
            if memory is not None and fresh:
                memory.invalidated(w)
        w.issue(counters, Pending(kind))

    return step
