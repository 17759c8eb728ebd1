"""Kinds of work of AMD instructions, the vector registers that they read and write, and bytes that they move.

As much of the instruction set as the cost of a main loop depends on. By the names of instructions, which differ little
between generations; what they cost is in the arch's rates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from tilewright_tools.analysis.disassembly import Instruction

__all__ = ["Kind", "Work", "work_of"]


class Kind(Enum):
    """Which part of a compute unit an instruction keeps busy."""

    MATRIX = "matrix"
    VECTOR = "vector"
    SCALAR = "scalar"
    LDS = "LDS"
    GLOBAL = "global"
    CONTROL = "control"
    """Waits, barriers, priorities, no-operations: no unit, but a turn of the wave."""
    BRANCH = "branch"


@dataclass(frozen=True, slots=True)
class Work:
    """One instruction as the model sees it. Registers are numbers: vector ones as they are, accumulation ones from
    ``AGPRS`` on."""

    kind: Kind
    slow: bool = False
    """A vector instruction at a quarter of the rate."""
    lane_flops: int = 0
    """Operations of a vector instruction's multiply-adds, two each, in one lane."""
    lane_bytes: int = 0
    """That each lane moves to or from LDS or global memory."""
    store: bool = False
    also_lds: bool = False
    """A load from global memory straight to LDS."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    accumulator: tuple[int, ...] = ()
    """Registers that a matrix instruction adds to."""
    turns: int = 1
    """Turns of the wave: a no-operation may take several."""
    counter: str = ""
    """That an access to memory counts up: ``vm``, ``vs`` or ``lgkm``."""
    waits: tuple[tuple[str, int], ...] = ()
    """Counters (``vm``, ``vs``, ``lgkm``) and to what they must have fallen."""


AGPRS = 1024
_REGISTERS = re.compile(r"\b([va])(?:(\d+)|\[(\d+):(\d+)\])")
_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos|tanh|mul_lo_[ui]32|mul_hi_[ui]32|mad_u64_u32|mad_i64_i32|div_)")
_NAMED_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}
_GLOBAL = ("global_", "buffer_", "flat_", "scratch_")
_CONTROL = ("s_nop", "s_barrier", "s_setprio", "s_sleep", "s_delay_alu", "s_sendmsg", "s_endpgm", "s_code_end")
_FUSED = re.compile(r"v_(dual_|pk_)?(?:fma|fmac|mad|mac|dot2c?)_")
_COMPARE = re.compile(r"v_cmpx?_")
_NO_RESULT = re.compile(r"(ds|global|buffer|flat|scratch)_(write|store|atomic|wbl2|inv|gl\d_inv|nop)")


def work_of(instruction: Instruction) -> Work:
    """Work of an instruction on a compute unit."""
    found = _work(instruction)
    if instruction.dual is not None:
        # Two vector operations in one turn.
        other = _work(instruction.dual)
        flops = found.lane_flops + other.lane_flops
        return Work(found.kind, found.slow, flops, reads=found.reads + other.reads, writes=found.writes + other.writes)
    return found


def _work(instruction: Instruction) -> Work:
    name = instruction.mnemonic
    if name.startswith(("v_mfma", "v_smfmac", "v_wmma", "v_swmmac")):
        return _matrix(instruction)
    if name.startswith(("s_waitcnt", "s_wait_")):
        return Work(Kind.CONTROL, waits=tuple(_waits(instruction)))
    if name == "s_nop":
        return Work(Kind.CONTROL, turns=int(instruction.operands[0], 0) + 1)
    if name.startswith(_CONTROL):
        return Work(Kind.CONTROL)
    if name.startswith(("s_branch", "s_cbranch", "s_call", "s_setpc")):
        return Work(Kind.BRANCH)
    if name.startswith(("s_load", "s_buffer_load", "s_store", "s_dcache")):
        return Work(Kind.SCALAR)
    if name.startswith("s_"):
        return Work(Kind.SCALAR)
    reads, writes = _registers_of(instruction)
    if name.startswith("ds_"):
        store = "write" in name or "store" in name
        size = _lds_bytes(name)
        return Work(Kind.LDS, lane_bytes=size, store=store, reads=reads, writes=writes, counter="lgkm")
    if name.startswith(_GLOBAL):
        store = "store" in name or "atomic" in name
        return Work(
            Kind.GLOBAL,
            lane_bytes=_global_bytes(name),
            store=store,
            also_lds="lds" in name or instruction.modifier("lds") is not None,
            reads=reads,
            writes=writes,
            # Since gfx10, whose names give bits instead of words, stores have a counter of their own.
            counter="vs" if store and re.search(r"_b\d+", name) else "vm",
        )
    return Work(Kind.VECTOR, _SLOW.match(name) is not None, _lane_flops(name), reads=reads, writes=writes)


def _matrix(instruction: Instruction) -> Work:
    result, a, b, c = (tuple(_registers(text)) for text in instruction.operands[:4])
    return Work(Kind.MATRIX, reads=a + b + c, writes=result, accumulator=c)


def _registers(text: str) -> Iterator[int]:
    for match in _REGISTERS.finditer(text):
        base = AGPRS if match[1] == "a" else 0
        first = int(match[2] or match[3])
        yield from range(base + first, base + int(match[4] or first) + 1)


def _registers_of(instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Registers read and written. The first operand is the result, unless there is none."""
    operands = list(instruction.operands)
    name = instruction.mnemonic
    to_lds = "lds" in name or instruction.modifier("lds") is not None
    writes: tuple[int, ...] = ()
    if (
        operands
        and not _NO_RESULT.match(name)
        and not (to_lds and name.startswith(_GLOBAL))
        and not _COMPARE.match(name)
    ):
        writes = tuple(_registers(operands.pop(0)))
    reads = tuple(register for operand in operands for register in _registers(operand))
    if name.startswith(("v_fmac", "v_mac", "v_dot", "v_pk_fmac")):
        reads += writes
    return reads, writes


@lru_cache(maxsize=256)
def _lane_flops(name: str) -> int:
    """FLOP of ``v_fma_f32``, ``v_dual_fmac_f32``, ``v_pk_fma_f32``, ``v_dot2_f32_f16``; 0 of any other."""
    match = _FUSED.match(name)
    if match is None or "_f" not in name:
        return 0
    return 4 if match[1] == "pk_" or "dot2" in name else 2


@lru_cache(maxsize=256)
def _lds_bytes(name: str) -> int:
    """Bytes that a lane moves: ``ds_read_b128``, ``ds_write2st64_b64``, ``ds_load_u8``, ``ds_bpermute_b32``."""
    match = re.search(r"_(?:b|u|i|f)(\d+)", name)
    size = int(match[1]) // 8 if match else 4
    return 2 * size if re.match(r"ds_(read|write|load|store)(2|_2addr)", name) else size


@lru_cache(maxsize=256)
def _global_bytes(name: str) -> int:
    """Bytes that a lane moves: ``global_load_dwordx4``, ``buffer_load_b128``, ``global_load_ushort``."""
    if match := re.search(r"dwordx(\d)", name):
        return 4 * int(match[1])
    if match := re.search(r"_(?:b|u|i|f)(\d+)", name):
        return int(match[1]) // 8
    return next((size for word, size in _NAMED_BYTES.items() if word in name), 4)


def _waits(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """The counters of ``s_waitcnt vmcnt(1)``, ``s_waitcnt_vscnt null, 0`` or ``s_wait_loadcnt_dscnt 0x102``."""
    name = instruction.mnemonic
    for operand in instruction.operands:
        if match := re.match(r"(vm|vs|lgkm)cnt\((\d+)\)", operand):
            yield match[1], int(match[2])
    if name == "s_waitcnt_vscnt":
        yield "vs", int(instruction.operands[-1], 0)
    elif name.startswith("s_wait_") and name not in ("s_wait_alu", "s_wait_event", "s_wait_idle"):
        value = int(instruction.operands[-1], 0)
        first, _, second = name.removeprefix("s_wait_").partition("_")
        counters = {"loadcnt": "vm", "storecnt": "vs", "dscnt": "lgkm", "kmcnt": "km"}
        if second:
            yield counters.get(first, first), value >> 8
            yield counters.get(second, second), value & 0x3F
        else:
            yield counters.get(first, first), value
