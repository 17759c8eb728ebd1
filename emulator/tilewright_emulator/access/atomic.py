"""Atomics on global memory and LDS. Lanes go one after the other, in order; waves of a group too."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

from tilewright_emulator.access.buffer import Place
from tilewright_emulator.access.global_memory import global_addresses
from tilewright_emulator.access.lds_access import lds_pending
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import LaneFault, OutOfBounds, UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand, register_bits
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.isa.scopes import reaches_device
from tilewright_emulator.memory.allocations import Allocation, check_alignment, elements_of
from tilewright_emulator.state.waits import Pending, counters_of
from tilewright_emulator.state.waves import Waves

Change = Callable[[int, int, int], int]  # (old, operand, compare) -> new, as unsigned integers of the element's width


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _floats(code: str, add: Callable[[float, float], float]) -> Change:
    word = {"e": "<H", "f": "<I", "d": "<Q"}[code]
    dtype = {"e": np.float16, "f": np.float32, "d": np.float64}[code]

    def change(old: int, new: int, compare: int) -> int:
        x, y = (struct.unpack("<" + code, struct.pack(word, v))[0] for v in (old, new))
        result = np.asarray(add(x, y)).astype(dtype)
        return int(struct.unpack(word, result.tobytes())[0])

    return change


def _bfloat(old: int, new: int) -> int:
    x, y = (struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in (old, new))
    bits = int(struct.unpack("<I", np.float32(x + y).tobytes())[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _pairs(half: Callable[[int, int], int]) -> Change:
    return lambda old, new, _: half(old & 0xFFFF, new & 0xFFFF) | half(old >> 16, new >> 16) << 16


_half = _floats("e", lambda x, y: x + y)


def _integer(kind: str, bits: int) -> Change | None:
    mask = (1 << bits) - 1
    table: dict[str, Change] = {
        "add": lambda old, new, _: (old + new) & mask,
        "sub": lambda old, new, _: (old - new) & mask,
        "rsub": lambda old, new, _: (new - old) & mask,
        "and": lambda old, new, _: old & new,
        "or": lambda old, new, _: old | new,
        "xor": lambda old, new, _: old ^ new,
        "swap": lambda old, new, _: new,
        "umin": lambda old, new, _: min(old, new),
        "umax": lambda old, new, _: max(old, new),
        "smin": lambda old, new, _: min(old, new, key=lambda v: _signed(v, bits)),
        "smax": lambda old, new, _: max(old, new, key=lambda v: _signed(v, bits)),
        "inc": lambda old, new, _: 0 if old >= new else old + 1,
        "dec": lambda old, new, _: new if old == 0 or old > new else old - 1,
        "cmpswap": lambda old, new, compare: new if old == compare else old,
    }
    return table.get(kind)


def change_of(text: str) -> tuple[Change, int, bool]:
    """Effect of an atomic, by the part of its name after ``atomic_``: the change, bytes, and whether it compares."""
    wide = text.endswith(("_x2", "64"))
    size = 8 if wide else 4
    plain = re.sub(r"_(x2|[buif]64|[bui]32)$", "", text)
    signed = text.endswith(("_i32", "_i64"))
    floating: dict[str, Change] = {
        "add_f32": _floats("f", lambda x, y: x + y), "add_f64": _floats("d", lambda x, y: x + y),
        "min_f64": _floats("d", min), "max_f64": _floats("d", max),
        "min_f32": _floats("f", min), "max_f32": _floats("f", max),
        "min_num_f32": _floats("f", min), "max_num_f32": _floats("f", max),
        "pk_add_f16": _pairs(lambda x, y: _half(x, y, 0)), "pk_add_bf16": _pairs(_bfloat),
    }  # fmt: skip
    if text in floating:
        return floating[text], size, False
    plain = {"min": "smin" if signed else "umin", "max": "smax" if signed else "umax"}.get(plain, plain)
    plain = {"min_i": "smin", "storexchg": "swap"}.get(plain, plain)
    change = _integer(plain, 8 * size)
    if change is None:
        raise UnknownInstruction(f"atomic {text}")
    return change, size, plain == "cmpswap"


def _apply(view: Array, at: Array, operands: Array, compares: Array | None, change: Change) -> Array:
    """Elements ``at`` of ``view`` in turn; gives the old ones."""
    before = np.empty(at.size, view.dtype)
    for lane, (index, operand) in enumerate(zip(at.tolist(), operands.tolist(), strict=True)):
        old = int(view[index])
        before[lane] = old
        view[index] = change(old, operand, 0 if compares is None else int(compares[lane]))
    return before


def _on_memory(w: Waves, addresses: Array, size: int, operands: Array, compares: Array | None, change: Change) -> Array:
    check_alignment(addresses, size)
    before = np.empty(addresses.size, f"u{size}")
    for allocation, lanes in w.run.memory.parts(addresses, size):
        chosen = np.arange(addresses.size) if lanes is None else lanes
        _writable(allocation, chosen)
        view, at, unit = elements_of(allocation, addresses[chosen], size)
        if unit < size:
            raise LaneFault(UnknownInstruction, 0, f"atomics need {allocation.name} at a multiple of 16")
        before[chosen] = _apply(view, at, operands[chosen], None if compares is None else compares[chosen], change)
    return before


def _writable(allocation: Allocation, lanes: Array) -> None:
    if not allocation.writable:
        raise LaneFault(OutOfBounds, int(lanes[0]), f"{allocation.name} is read-only")


def _operands(w: Waves, data: Operand, size: int, compares: bool) -> tuple[Array, Array | None]:
    """Lanes' operands, and what they compare with: it follows the new value in the registers."""
    words = size // 4
    raw = (
        w.stored_registers(data.index, words * (2 if compares else 1))
        .view(f"u{size}")
        .reshape(-1, 2 if compares else 1)
    )
    return raw[:, 0], raw[:, 1] if compares else None


def _returns(instruction: Instruction) -> bool:
    """True if the old value is wanted: glc, sc0 (gfx942) or TH_ATOMIC_RETURN."""
    m = instruction.modifiers
    return "glc" in m or "sc0" in m or "RETURN" in m.get("th", "")


def _global(instruction: Instruction, arch: Arch) -> Step:
    change, size, compares = change_of(re.sub(r"^\w+?_atomic_", "", instruction.name))
    printed = [Operand.parse(text) for text in instruction.operands]
    returned = printed.pop(0) if _returns(instruction) else None
    if instruction.name.startswith("buffer"):
        data, place = printed[0], Place.of(instruction, printed[1:4], arch)
        address = None
    else:
        data, place = printed[1], None
        address = global_addresses(printed[0], printed[2] if len(printed) > 2 else None, instruction.number("offset"))
    flat = instruction.name.startswith("flat")
    counters = counters_of(arch, ("flat_" if flat else "") + ("load" if returned or arch.generation == 9 else "store"))
    registers, wide = register_bits(returned) if returned else 0, reaches_device(instruction, arch, "atomic")

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        operands, other = _operands(w, data, size, compares)
        if place is not None:
            addresses, inside = place.resolve(w, place.offsets(w), size)
            before = np.zeros(addresses.size, f"u{size}")
            if inside.any():
                chosen = None if other is None else other[inside]
                before[inside] = _on_memory(w, addresses[inside], size, operands[inside], chosen, change)
        else:
            assert address is not None
            addresses = w.active(address(w))
            before = _on_memory(w, addresses, size, operands, other, change)
        if w.run.publication is not None:
            w.run.publication.atomic(w, addresses, wide)
        if returned is not None:
            w.load_registers(returned.index, before.reshape(-1, 1).view(np.uint8))
        w.issue(counters, Pending("load" if returned else "store", registers))

    return step


def _lds(instruction: Instruction, arch: Arch) -> Step:
    text = re.sub(r"^ds_", "", instruction.name)
    returns = "_rtn" in text
    text = (
        re.sub(r"_rtn", "", text).replace("cmpst", "cmpswap").replace("cmpstore", "cmpswap").replace("wrxchg", "swap")
    )
    change, size, compares = change_of(text.replace("storexchg", "swap"))
    swapped = "cmpst_" in instruction.name and arch.generation == 9  # compare value first
    printed = [Operand.parse(part) for part in instruction.operands]
    returned = printed.pop(0) if returns else None
    address, sources, offset = printed[0].index, printed[1:], instruction.number("offset")
    counters, registers = counters_of(arch, "lds"), register_bits(returned) if returned else 0

    def step(w: Waves) -> None:
        if not (w.full or w.exec.any()):
            return
        addresses = w.active(w.u32[address]).astype(np.int64) + offset
        values = [w.stored_registers(s.index, size // 4).view(f"u{size}")[:, 0] for s in sources]
        if compares and swapped:
            values.reverse()
        lds = w.run.lds
        lds.check(addresses, size)
        places = addresses + w.active(w.bases)
        lds.note_write(places, size, w.active(w.marks), atomic=True)
        before = _apply(lds.views[size], places // size, values[0], values[1] if compares else None, change)
        if returned is not None:
            w.load_registers(returned.index, before.reshape(-1, 1).view(np.uint8))
        lds_pending(w, counters, registers, [], True)

    return step


INTEGER = ("add", "sub", "and", "or", "xor", "swap", "umin", "umax", "smin", "smax", "inc", "dec", "cmpswap")
NAMES9 = [f"{kind}{wide}" for kind in INTEGER for wide in ("", "_x2")]
NAMES11 = [
    f"{kind}_{t}{bits}"
    for kind, types in (
        ("add", "u"), ("sub", "u"), ("and", "b"), ("or", "b"), ("xor", "b"), ("swap", "b"), ("cmpswap", "b"),
        ("min", "iu"), ("max", "iu"), ("inc", "u"), ("dec", "u"),
    )
    for t in types
    for bits in (32, 64)
]  # fmt: skip
FLOATS = ("add_f32", "add_f64", "min_f64", "max_f64", "min_f32", "max_f32", "min_num_f32", "max_num_f32")
PACKED = ("pk_add_f16", "pk_add_bf16")
for _space in ("global", "flat", "buffer"):
    for _name in (*NAMES9, *NAMES11, *FLOATS, *PACKED):
        builder(f"{_space}_atomic_{_name}")(_global)
LDS_KINDS = [
    f"{kind}{rtn}_{t}{bits}"
    for kind, types in (
        ("add", "u"), ("sub", "u"), ("rsub", "u"), ("and", "b"), ("or", "b"), ("xor", "b"), ("min", "iu"),
        ("max", "iu"), ("inc", "u"), ("dec", "u"), ("cmpst", "b"), ("cmpstore", "b"),
    )
    for rtn in ("", "_rtn")
    for t in types
    for bits in (32, 64)
]  # fmt: skip
for _name in (*LDS_KINDS, "wrxchg_rtn_b32", "wrxchg_rtn_b64", "storexchg_rtn_b32", "storexchg_rtn_b64"):
    builder(f"ds_{_name}", written=int("rtn" in _name))(_lds)
for _name in ("add_f32", "add_f64", "min_f32", "max_f32", "pk_add_f16", "pk_add_bf16", "add_rtn_f32", "add_rtn_f64",
              "pk_add_rtn_f16", "pk_add_rtn_bf16"):  # fmt: skip
    builder(f"ds_{_name}", written=int("rtn" in _name))(_lds)
