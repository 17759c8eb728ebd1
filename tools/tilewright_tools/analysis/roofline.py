"""From a code object to the least time that its main loop, and a problem computed with it, can take.

A bound, not a prediction: docs/analysis.md states the model and what it leaves out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright_arch import ArchSpec, Rates
from tilewright_kit.contract.abilities import Product, WorkShare
from tilewright_kit.types.errors import UnsupportedError
from tilewright_server.build.toolchains.code_object import KernelFacts, read_code_object
from tilewright_tools.analysis.disassembly import Disassembler, Function, Instruction
from tilewright_tools.analysis.instructions import Kind, work_of
from tilewright_tools.analysis.loops import Loop, main_loop, main_loops, whole_loop
from tilewright_tools.analysis.occupancy import Occupancy, occupancy_of
from tilewright_tools.analysis.schedule import UnknownRateError, cycles_per_iteration, rate_of

__all__ = ["Analysis", "LoopCost", "Problem", "ProblemBound", "analyze", "bound_of", "cost_of", "rates_of"]


_SCARCE = {"registers": "too few registers", "LDS": "too little LDS", "waves": "room for too few waves"}


@dataclass(frozen=True, slots=True)
class LoopCost:
    """One iteration of the main loop, for one wave. Cycles are those for which it keeps a unit busy."""

    counts: Mapping[str, int]
    """Instructions by kind, as ``Kind`` names them."""
    flops: int
    """FLOP of its matrix instructions, or of its multiply-adds if there are none."""
    matrix: int
    vector: int
    """Cycles of the vector unit of its SIMD; with matrix instructions where these run on it."""
    scalar: int
    lds: float
    """Cycles of the whole unit's LDS."""
    global_: float
    """Cycles of the whole unit's path to L2."""
    alone: float
    """From one iteration to the next if the wave has its SIMD to itself: turns, latencies and waits included."""
    matrix_mnemonics: Mapping[str, int] = field(default_factory=dict)

    def cycles(self, waves_per_simd: int, waves: int) -> dict[str, float]:
        """Least cycles of an iteration of all resident waves (``waves`` on the unit), by what might limit."""
        return {
            "matrix": float(self.matrix * waves_per_simd),
            "vector": float(self.vector * waves_per_simd),
            "scalar": float(self.scalar * waves_per_simd),
            "LDS": self.lds * waves,
            "global": self.global_ * waves,
            "wave": self.alone,
        }


@dataclass(frozen=True, slots=True)
class Analysis:
    """Static analysis of a kernel."""

    kernel: KernelFacts
    arch: ArchSpec
    waves: int
    """Waves of a workgroup."""
    lds_bytes: int
    occupancy: Occupancy
    loop: Loop
    cost: LoopCost
    resident: int
    """Workgroups of a unit that the figures are for."""
    in_step: float
    """Cycles of an iteration if all waves of the unit access LDS and memory at the same moments: not a bound but what
    to expect of waves that barriers keep together, as far as these units go."""
    cut: LoopCost
    """The same as ``cost`` for turns in which not all products count; ``cost`` itself without a loop of their own."""

    @property
    def waves_per_simd(self) -> int:
        rates = rates_of(self.arch)
        return -(-self.resident * self.waves // rates.simds)

    @property
    def cycles(self) -> dict[str, float]:
        """Cycles of an iteration of all resident waves, by what might limit it."""
        return self.cost.cycles(self.waves_per_simd, self.resident * self.waves)

    @property
    def limit(self) -> str:
        """Limit of the main loop; among equals the first, and the matrix unit is the first."""
        cycles = self.cycles
        return max(cycles, key=lambda name: cycles[name])

    @property
    def matrix_share(self) -> float:
        """The part of the main loop's time for which the matrix units are busy, at the most: 0 to 1."""
        cycles = self.cycles
        return cycles["matrix"] / max(cycles.values()) if cycles["matrix"] else 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """A product, as launched: what workgroups there are and what each does."""

    product: Product
    share: WorkShare
    workgroups: int
    """Launched. A persistent kernel's go through several slices."""


@dataclass(frozen=True, slots=True)
class ProblemBound:
    """The least time of a problem, and the most operations per second."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds of the busiest unit: ``loop``, ``fill``, ``drain``; and ``memory`` of the whole device."""
    flops_per_second: float
    peak_flops_per_second: float
    units_used: float
    """Share of the units' time that tiles can fill: 1 if they divide evenly."""
    edge: float
    """Share of the computed tiles that lies inside the problem."""

    @property
    def share_of_peak(self) -> float:
        return self.flops_per_second / self.peak_flops_per_second if self.peak_flops_per_second else 0.0


def rates_of(arch: ArchSpec) -> Rates:
    """Raises ``UnsupportedError`` for an arch without rates."""
    if arch.rates is None:
        raise UnsupportedError(
            "kernels of this arch cannot be analysed: its spec states no rates",
            field="arch",
            value=arch.id,
            rule="arch_rates",
            fix="use an AMD GPU's arch, or add `rates` to the spec",
        )
    return arch.rates


def cost_of(body: Sequence[Instruction], rates: Rates, lanes: int) -> LoopCost:
    """Cost of one iteration of a loop for one wave. Raises ``UnknownRateError``."""
    counts: Counter[str] = Counter()
    mnemonics: Counter[str] = Counter()
    flops = fused = matrix = vector = scalar = lds = memory = 0
    for instruction in body:
        work = work_of(instruction)
        counts[work.kind.value] += 1
        if work.kind is Kind.MATRIX:
            rate = rate_of(instruction, rates)
            mnemonics[instruction.mnemonic] += 1
            flops += rate.flops
            matrix += rate.cycles
            # It is issued like a vector instruction even where a unit of its own does the work.
            vector += rate.cycles if rates.matrix_on_vector_unit else rates.issue_cycles
        elif work.kind is Kind.VECTOR:
            vector += rates.slow_vector_cycles if work.slow else rates.vector_cycles
            fused += work.lane_flops * lanes
        elif work.kind is Kind.SCALAR:
            scalar += rates.issue_cycles
        lds += work.lane_bytes * lanes if work.kind is Kind.LDS or work.also_lds else 0
        memory += work.lane_bytes * lanes if work.kind is Kind.GLOBAL else 0
    return LoopCost(
        counts=dict(counts),
        flops=flops or fused,
        matrix=matrix,
        vector=vector,
        scalar=scalar,
        lds=lds / rates.lds_bytes_per_cycle,
        global_=memory / rates.global_bytes_per_cycle,
        alone=cycles_per_iteration(body, rates, lanes),
        matrix_mnemonics=dict(mnemonics),
    )


def analyze(
    image: bytes,
    arch: ArchSpec,
    *,
    waves: int,
    lds_bytes: int = 0,
    name: str = "",
    resident: int = 0,
    turn_flops: float = 0.0,
    disassembler: Disassembler | None = None,
) -> Analysis:
    """Analyse the kernel ``name`` (empty: the only one) of a code object, launched with ``waves`` waves a workgroup and
    ``lds_bytes`` of dynamic LDS, with ``resident`` workgroups on a unit (0: as many as fit). A turn of its main
    loop has products of ``turn_flops`` (0: those of its innermost loop).

    Raises ``ToolchainMissingError``, ``InvalidArgumentError`` for an image or a name, and ``UnsupportedError`` for an
    arch without rates, a kernel that does not fit a unit, or one without a loop that could be its main loop.
    """
    rates = rates_of(arch)
    code = read_code_object(image)
    kernel = code.kernel(name or (code.kernels[0].name if code.kernels else ""))
    functions = {item.name: item for item in (disassembler or Disassembler()).disassemble(image)}
    function = functions.get(kernel.name, Function(kernel.name, 0, ()))
    loop = main_loop(function)
    total = kernel.lds_bytes + lds_bytes
    occupancy = occupancy_of(arch, rates, waves=waves, vgprs=kernel.vgprs, lds_bytes=total)
    if loop is None:
        raise _unsupported(kernel.name, "it has no loop that multiplies")
    if not occupancy.workgroups:
        raise _unsupported(kernel.name, f"a unit has {_SCARCE[occupancy.limit]} for a single workgroup of it")
    other = loop
    try:
        if turn_flops:
            loop, other = _turns(function, loop, rates, turn_flops / waves)
        cost = cost_of(loop.body, rates, kernel.wave)
        cut = cost if other is loop else cost_of(other.body, rates, kernel.wave)
    except UnknownRateError as error:
        raise _unsupported(kernel.name, str(error)) from error
    here = min(resident or occupancy.workgroups, occupancy.workgroups)
    together = cycles_per_iteration(loop.body, rates, kernel.wave, here * waves)
    in_step = max(together, *cost.cycles(-(-here * waves // rates.simds), here * waves).values())
    return Analysis(kernel, arch, waves, total, occupancy, loop, cost, here, in_step, cut)


def _turns(function: Function, inner: Loop, rates: Rates, flops: float) -> tuple[Loop, Loop]:
    """The loops of whole turns and of turns that something cuts: the shortest and the longest of those that have all
    products of a turn. Both are the same if there is one.
    """
    whole = [loop for loop in main_loops(function) if _matrix_flops(loop.body, rates) == flops]
    if len(whole) > 1:
        return whole[0], whole[-1]
    turn = _whole_turn(function, inner, rates, flops)
    return turn, turn


def _whole_turn(function: Function, inner: Loop, rates: Rates, flops: float) -> Loop:
    """One turn of the loop around the products, of a wave, which has so many FLOP: loops inside it that multiply are
    unrolled, all as often, until it has them. The innermost loop itself if it has them all: what is around goes round
    for more than a turn.
    """
    if _matrix_flops(inner.body, rates) >= flops:
        return inner
    whole, inside = whole_loop(function, inner)
    parts = {item.address: part for part in inside for item in part.body}
    of_parts = sum(_matrix_flops(part.body, rates) for part in inside)
    own = _matrix_flops(whole.body, rates) - of_parts
    times = max(int((flops - own) / of_parts), 1) if of_parts else 1
    body: list[Instruction] = []
    for item in whole.body:
        part = parts.get(item.address)
        if part is None:
            body.append(item)
        elif item.address == part.body[0].address:
            body.extend(part.body * times)
    matrix = sum(work_of(item).kind is Kind.MATRIX for item in body)
    return replace(whole, body=tuple(body), matrix_instructions=matrix)


def _matrix_flops(body: Sequence[Instruction], rates: Rates) -> int:
    return sum(rate_of(item, rates).flops for item in body if work_of(item).kind is Kind.MATRIX)


def _unsupported(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} cannot be analysed: {why}",
        field="name",
        value=name,
        rule="analysis",
        fix="choose a kernel whose main loop multiplies matrices, and state the rates of its instructions in the spec",
    )


def bound_of(found: Analysis, problem: Problem) -> ProblemBound:
    """The least time of a problem. Workgroups are dealt to units evenly, all that fit run at a time."""
    arch, rates = found.arch, rates_of(found.arch)
    clock = arch.throughput.clock_mhz * 1e6
    units = arch.throughput.units
    share = problem.share
    per_unit = math.ceil(share.slices / units)
    resident = max(min(found.occupancy.workgroups, math.ceil(problem.workgroups / units)), 1)
    step = found.cost.flops * found.waves
    iterations = share.flops / step if step else 0.0

    def rounds(count: int) -> float:
        """Cycles of the main loops of ``count`` workgroups that run together on a unit."""
        waves = count * found.waves
        whole, cut = (max(loop.cycles(-(-waves // rates.simds), waves).values()) for loop in (found.cost, found.cut))
        return iterations * (whole + (cut - whole) * share.cut)

    loop = per_unit // resident * rounds(resident) + (rounds(per_unit % resident) if per_unit % resident else 0.0)
    # With several workgroups on a unit, all but the first can begin and end beside another's main loop.
    exposed = per_unit if resident == 1 and problem.workgroups == share.slices else 1
    fill = exposed * (rates.global_latency + rates.lds_latency + share.bytes_begin / rates.global_bytes_per_cycle)
    drain = exposed * (share.bytes_end / rates.global_bytes_per_cycle)
    product = problem.product
    memory = (product.bytes_in + product.bytes_out) / max(arch.throughput.memory_bytes_per_second, 1)
    parts = {"loop": loop / clock, "fill": fill / clock, "drain": drain / clock, "memory": memory}
    seconds = max(parts["loop"] + parts["fill"] + parts["drain"], memory)
    return ProblemBound(
        seconds=seconds,
        parts=parts,
        flops_per_second=share.useful_flops / seconds,
        peak_flops_per_second=_peak(found, product.dtype.value),
        units_used=share.slices / (per_unit * units),
        edge=share.edge,
    )


def _peak(found: Analysis, dtype: str) -> float:
    """Operations per second of the device for ``dtype``; or for what the kernel multiplies instead, if that is faster:
    a type without an instruction of its own is converted.
    """
    arch, rates = found.arch, rates_of(found.arch)
    used = [rates.matrix[name] for name in found.cost.matrix_mnemonics if name in rates.matrix]
    fastest = max((rate.flops * rates.simds / rate.cycles for rate in used), default=0.0)
    if found.cost.matrix_mnemonics:  # of narrow formats, faster than the arch states of the type that they count as
        fastest = max(fastest, found.cost.flops * rates.simds / found.cost.matrix)
    stated = arch.throughput.peak_flops(dtype) or 0.0
    return max(stated, fastest * arch.throughput.units * arch.throughput.clock_mhz * 1e6)
