"""Branches, barriers, waits and the end of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import VCC, Array
from tilewright_emulator.state.waits import waits_of
from tilewright_emulator.state.waves import Waves


@dataclass(frozen=True)
class Jump:
    """Where some of the waves go on: ``taken`` bool ``(waves,)`` or one for all; ``target`` an address."""

    taken: Array | bool
    target: int


@dataclass(frozen=True)
class Stop:
    """The waves stop here: at a barrier, or for good."""

    why: Literal["barrier", "end"]


BARRIER, END = Stop("barrier"), Stop("end")


def _is_zero(w: Waves, register: int) -> Array:
    words = w.lanes // 32
    empty: Array = np.logical_not(np.any(w.scalars[:, register : register + words], axis=1))
    return empty


def _has_lanes(w: Waves) -> Array:
    some: Array = np.asarray(np.any(w.exec, axis=1))
    return some


CONDITIONS: dict[str, Callable[[Waves], Array]] = {
    "scc0": lambda w: ~w.scc[:, 0],
    "scc1": lambda w: w.scc[:, 0],
    "vccz": lambda w: _is_zero(w, VCC),
    "vccnz": lambda w: ~_is_zero(w, VCC),
    "execz": lambda w: ~_has_lanes(w),
    "execnz": _has_lanes,
}


@builder("s_branch", *(f"s_cbranch_{name}" for name in CONDITIONS), written=0)
def _branch(instruction: Instruction, arch: Arch) -> Step:
    target = instruction.target
    if target is None:
        raise UnknownInstruction(f"a branch without a target: {instruction.text}")
    always = Jump(True, target)
    if instruction.name == "s_branch":
        return lambda w: always
    condition = CONDITIONS[instruction.name.rpartition("_")[2]]

    def step(w: Waves) -> Jump | None:
        taken = condition(w)
        if not taken.any():
            return None
        return always if taken.all() else Jump(taken, target)

    return step


@builder("s_endpgm", "s_endpgm_saved", written=0)
def _end(instruction: Instruction, arch: Arch) -> Step:
    return lambda w: END


@builder("s_barrier", written=0)
def _barrier(instruction: Instruction, arch: Arch) -> Step:
    return lambda w: BARRIER


@builder("s_barrier_signal", written=0)
def _signal(instruction: Instruction, arch: Arch) -> Step:
    if instruction.operands[0] != "-1":
        raise UnknownInstruction(f"only the workgroup's barrier is modelled: {instruction.text}")

    def step(w: Waves) -> None:
        w.signalled = True
        # Everything that is not waited for by now may happen on the other side of the barrier.
        w.since_signal = [pending for queue in w.queues.by_counter.values() for pending in queue if pending.again]

    return step


@builder("s_barrier_wait", written=0)
def _barrier_wait(instruction: Instruction, arch: Arch) -> Step:
    if instruction.operands[0] not in ("-1", "0xffff", "65535"):
        raise UnknownInstruction(f"only the workgroup's barrier is modelled: {instruction.text}")
    return lambda w: BARRIER


@builder(
    "s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt", "s_waitcnt_expcnt", "s_wait_loadcnt",
    "s_wait_storecnt", "s_wait_dscnt", "s_wait_kmcnt", "s_wait_samplecnt", "s_wait_bvhcnt", "s_wait_expcnt",
    "s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt", written=0,
)  # fmt: skip
def _wait(instruction: Instruction, arch: Arch) -> Step:
    waits = waits_of(instruction)

    def step(w: Waves) -> None:
        for counter, most in waits:
            w.wait(counter, most)

    return step


@builder("s_wait_idle", written=0)
def _wait_idle(instruction: Instruction, arch: Arch) -> Step:
    def step(w: Waves) -> None:
        for counter in list(w.queues.by_counter):
            w.wait(counter, 0)

    return step


@builder(
    "s_nop", "s_sleep", "s_setprio", "s_setprio_inc_wg", "s_clause", "s_delay_alu", "s_code_end", "s_sendmsg",
    "s_wait_alu",
    "s_wait_event", "s_waitcnt_depctr", "s_inst_prefetch", "s_set_inst_prefetch_distance", "s_ttracedata",
    "s_ttracedata_imm", "s_incperflevel", "s_decperflevel", "v_nop", "s_sethalt",
    "s_sleep_var", "s_monitor_sleep", "s_version", "s_setvskip", "s_wakeup", written=0,
)  # fmt: skip
def _nothing(instruction: Instruction, arch: Arch) -> Step:
    """An instruction that changes nothing but timing."""
    return lambda w: None


@builder("s_trap", written=0)
def _trap(instruction: Instruction, arch: Arch) -> Step:
    def step(w: Waves) -> None:
        raise UnknownInstruction("the kernel trapped (an assertion, or code that must not be reached)")

    return step


@builder("s_getpc_b64")
def _get_pc(instruction: Instruction, arch: Arch) -> Step:
    pair, after = instruction.operand(0).index >> 1, instruction.address + instruction.size

    def step(w: Waves) -> None:
        w.s_u64[pair][...] = np.uint64(w.run.code_base + after)

    return step


@builder("s_setpc_b64", written=0)
def _set_pc(instruction: Instruction, arch: Arch) -> Step:
    pair = instruction.operand(0).index >> 1

    def step(w: Waves) -> Jump:
        return Jump(True, _uniform(w, pair))

    return step


@builder("s_swappc_b64", "s_call_b64")
def _call(instruction: Instruction, arch: Arch) -> Step:
    link, after = instruction.operand(0).index >> 1, instruction.address + instruction.size
    target = instruction.target

    def step(w: Waves) -> Jump:
        to = target if target is not None else _uniform(w, instruction.operand(1).index >> 1)
        w.s_u64[link][...] = np.uint64(w.run.code_base + after)
        return Jump(True, to)

    return step


def _uniform(w: Waves, pair: int) -> int:
    places = np.unique(w.s_u64[pair])
    if places.size != 1:
        raise UnknownInstruction("waves that run together jump to different addresses")
    return int(places[0]) - w.run.code_base


@builder("s_setreg_b32", "s_setreg_imm32_b32", written=0)
def _set_register(instruction: Instruction, arch: Arch) -> Step:
    """Hardware registers: only those whose setting changes nothing that is modelled; not the modes of floats."""
    text = instruction.text
    if "SCHED_MODE" in text:
        return lambda w: None
    raise UnknownInstruction(f"hardware register: {text}")
