"""One wave, alone on its SIMD, going round a loop: when each instruction begins, and what it waited for.

In order, as the hardware issues: an instruction begins when the wave's turn has come, its unit is free, its registers
are there and the counters that it waits for have fallen. Everything is a maximum of sums, so more work never takes less
time. What a wave does not see alone (the others' use of LDS and caches, misses, conflicts) is left out: the result is
the least that an iteration can take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright_arch import MatrixRate, Rates
from tilewright_tools.analysis.disassembly import Instruction
from tilewright_tools.analysis.instructions import Kind, Work, work_of

__all__ = ["Cause", "Step", "UnknownRateError", "cycles_per_iteration", "rate_of", "run"]

Cause = Literal["", "unit", "registers", "memory"]
"""Why an instruction began later than the wave's turn: its unit was busy, a result was missing, a load was."""

_ROUNDS = 12
"""Iterations that are followed; the first half lets the pipeline fill."""


class UnknownRateError(Exception):
    """The arch's rates do not have a matrix instruction."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of one iteration, in cycles since the beginning."""

    instruction: Instruction
    work: Work
    begin: int
    stall: int
    """Cycles that it began after the wave's turn."""
    cause: Cause


@dataclass(slots=True)
class _Wave:
    """Where a wave stands."""

    turn: int = 0
    free: dict[Kind, int] = field(default_factory=dict)
    """When a unit takes the next instruction."""
    ready: dict[int, int] = field(default_factory=dict)
    """When a register's value can be used."""
    chained: dict[tuple[int, ...], tuple[int, str, int]] = field(default_factory=dict)
    """When, and by which instruction, an accumulator can be added to, and when anything else can use it."""
    path: dict[Kind, int] = field(default_factory=dict)
    """When the way to LDS or to memory takes the next access."""
    pending: dict[str, list[int]] = field(default_factory=dict)
    """By counter, when operations that are under way will be done, in their order."""


def rate_of(instruction: Instruction, rates: Rates) -> MatrixRate:
    """The rate of a matrix instruction. Raises ``UnknownRateError``."""
    name = instruction.mnemonic.removesuffix("_e64").removesuffix("_e32")
    found = rates.matrix.get(name.replace("v_mfma_scale_", "v_mfma_"))  # factors cost nothing
    if found is None:
        raise UnknownRateError(f"the arch states no rate of {name}")
    narrow = name.endswith("f8f6f4") and all(_is_narrow(instruction, side) for side in ("cbsz", "blgp"))
    return replace(found, cycles=found.narrow_cycles) if narrow else found


def _is_narrow(instruction: Instruction, side: str) -> bool:
    """True if the first (``cbsz``) or the second operand has a format of fewer than 8 bits."""
    return int(instruction.modifier(side) or 0) > 1


def cycles_per_iteration(body: Sequence[Instruction], rates: Rates, wave_lanes: int, sharers: int = 1) -> float:
    """Cycles that one wave alone takes to go round, once the pipeline is full. Raises ``UnknownRateError``."""
    ends = [steps[-1].begin for steps in run(body, rates, wave_lanes, _ROUNDS, sharers)]
    half = _ROUNDS // 2
    return (ends[-1] - ends[half - 1]) / (_ROUNDS - half)


def run(
    body: Sequence[Instruction], rates: Rates, wave_lanes: int, rounds: int, sharers: int = 1
) -> Iterator[list[Step]]:
    """The steps of each of ``rounds`` iterations. With ``sharers``, so many waves access LDS and memory at the same
    moments as this one, and it is served last. Raises ``UnknownRateError``.
    """
    works = [(instruction, work_of(instruction)) for instruction in body]
    wave = _Wave()
    for _ in range(rounds):
        yield [_step(wave, instruction, work, rates, wave_lanes * sharers) for instruction, work in works]


def _step(wave: _Wave, instruction: Instruction, work: Work, rates: Rates, lanes: int) -> Step:
    waits: tuple[tuple[Cause, int], ...] = (
        ("memory", _memory_ready(wave, work)),
        ("registers", max(_operands_ready(wave, instruction, work), _results_free(wave, instruction, work, rates))),
        ("unit", wave.free.get(_unit(work, rates), 0)),
    )
    begin = max(wave.turn, *(when for _, when in waits))
    cause: Cause = next(name for name, when in waits if when == begin) if begin > wave.turn else ""
    step = Step(instruction, work, begin, begin - wave.turn, cause)
    wave.turn = begin + work.turns * rates.issue_cycles
    _occupy(wave, instruction, work, begin, rates, lanes)
    return step


def _unit(work: Work, rates: Rates) -> Kind:
    return Kind.VECTOR if work.kind is Kind.MATRIX and rates.matrix_on_vector_unit else work.kind


def _operands_ready(wave: _Wave, instruction: Instruction, work: Work) -> int:
    ready = wave.ready
    if work.accumulator:
        when, mnemonic, result = wave.chained.get(work.accumulator, (0, "", 0))
        # Whoever else wrote one of them since then made it ready at another time.
        untouched = all(ready.get(register, 0) == result for register in work.accumulator)
        if mnemonic == instruction.mnemonic and untouched:
            operands = work.reads[: len(work.reads) - len(work.accumulator)]
            return max([when, *(ready.get(register, 0) for register in operands)])
    return max((ready.get(register, 0) for register in work.reads), default=0)


def _results_free(wave: _Wave, instruction: Instruction, work: Work, rates: Rates) -> int:
    """When the instruction may begin, so that its results do not come before those that it replaces."""
    if not work.writes or work.writes == work.accumulator:
        return 0
    replaced = max(wave.ready.get(register, 0) for register in work.writes)
    return replaced - _latency(instruction, work, rates)


def _latency(instruction: Instruction, work: Work, rates: Rates) -> int:
    """From an instruction's begin until its results can be used, with all units free."""
    if work.kind is Kind.MATRIX:
        return rate_of(instruction, rates).cycles + rates.matrix_latency
    if work.kind is Kind.VECTOR:
        return max(rates.slow_vector_cycles if work.slow else rates.vector_cycles, rates.vector_latency)
    return {Kind.LDS: rates.lds_latency, Kind.GLOBAL: rates.global_latency}.get(work.kind, 0)


def _memory_ready(wave: _Wave, work: Work) -> int:
    """When the counters have fallen far enough. What was waited for is under way no longer."""
    latest = 0
    for counter, left in work.waits:
        queue = wave.pending.get(counter, [])
        done = queue[: max(len(queue) - left, 0)]
        latest = max([latest, *done])
        wave.pending[counter] = queue[len(done) :]
    return latest


def _occupy(wave: _Wave, instruction: Instruction, work: Work, begin: int, rates: Rates, lanes: int) -> None:
    """Mark the units that the instruction keeps busy, and the time of its results."""
    result = begin + _latency(instruction, work, rates)
    if work.kind is Kind.MATRIX:
        end = begin + rate_of(instruction, rates).cycles
        wave.free[_unit(work, rates)] = end
        wave.chained[work.writes] = (end + rates.chain_latency, instruction.mnemonic, result)
    elif work.kind is Kind.VECTOR:
        wave.free[Kind.VECTOR] = begin + (rates.slow_vector_cycles if work.slow else rates.vector_cycles)
    elif work.counter:
        _move(wave, instruction, work, begin, rates, lanes)
        return  # what is loaded is covered by the waits
    for register in work.writes:
        wave.ready[register] = result


def _move(wave: _Wave, instruction: Instruction, work: Work, begin: int, rates: Rates, lanes: int) -> None:
    """An access to memory: queued behind earlier ones on its path, and done a latency later, in order."""
    width = rates.lds_bytes_per_cycle if work.kind is Kind.LDS else rates.global_bytes_per_cycle
    end = max(begin, wave.path.get(work.kind, 0)) + -(-work.lane_bytes * lanes // width)
    wave.path[work.kind] = end
    queue = wave.pending.setdefault(work.counter, [])
    done = end if work.store else end + _latency(instruction, work, rates)
    queue.append(max([done, *queue[-1:]]))
