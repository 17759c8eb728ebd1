"""The typed form of an architecture spec. Values only; reading files is ``loader``'s work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from .errors import UnknownFeatureError, UnknownPipelineError
from .frozen import FrozenMap
from .rates import Rates
from .reading import Fields

Triple = tuple[int, int, int]
Section = TypeVar("Section")
TileTable = FrozenMap[str, tuple[Triple, ...]]
_NONE: FrozenMap[Triple, str] = FrozenMap()


@dataclass(frozen=True, slots=True)
class Caches:
    """Data cache sizes in bytes as one core or compute unit sees them; 0 means absent."""

    line_bytes: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """A way to multiply one warp tile.

    ``wave_threads`` is how many threads issue it together, which is also what one unit of a
    wave triple stands for: 64 or 32 on AMD, 32 for ``mma.sync``, 128 (a warpgroup) for
    ``wgmma``, 1 on a CPU. ``operand_copies``: how often the threads together hold each operand.
    """

    name: str
    wave_threads: int
    description: str
    operand_copies: int = 1


@dataclass(frozen=True, slots=True)
class RegisterSplit:
    """Registers of one thread in a warp-specialised workgroup with ``consumers`` waves that compute."""

    consumers: int
    producer: int
    consumer: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One way to overlap global memory, LDS and registers, and what it can be combined with.

    ``lds_fraction`` is the part of the LDS that one stage of A and B may fill;
    ``extra_threads`` are producer threads that the wave triple does not count. A kernel keeps
    ``min_stages`` to ``max_stages`` stages in the LDS; ``clusters`` are the workgroup clusters
    that it may be launched in. ``reserved_registers`` of a thread are not for accumulators, and
    ``register_splits`` say, by number of consumers, how a specialised workgroup divides the rest.
    """

    name: str
    lds_fraction: float
    double_buffer: bool
    schedulers: tuple[str, ...]
    epilogues: tuple[str, ...]
    instructions: tuple[str, ...]
    extra_threads: int
    min_stages: int
    max_stages: int
    clusters: tuple[Triple, ...]
    reserved_registers: int
    register_splits: tuple[RegisterSplit, ...]
    description: str

    def register_split(self, consumers: int) -> RegisterSplit | None:
        """The split for that many consumers; None if the pipeline cannot have them."""
        return next((split for split in self.register_splits if split.consumers == consumers), None)


@dataclass(frozen=True, slots=True)
class BulkCopy:
    """The engine that copies tiles of tensors between global and shared memory.

    ``max_box`` elements in each dimension of one copy; addresses and strides are multiples of
    ``alignment`` bytes; the fastest dimension of a box fills ``swizzle_bytes``, and
    ``swizzle_rows`` such rows are one pattern.
    """

    max_box: int
    alignment: int
    swizzle_bytes: int
    swizzle_rows: int


@dataclass(frozen=True, slots=True)
class Trait:
    """A combination of pipeline, epilogue and scheduler that must not be generated, and why."""

    pipeline: str
    epilogue: str
    scheduler: str
    reason: str


@dataclass(frozen=True, slots=True)
class Throughput:
    """Peak rates for analytic cost models. 0 means unknown: ask the machine.

    ``units`` are CUs, SMs or cores; ``flops_per_cycle_per_unit`` counts a multiply-add as two.
    """

    units: int
    clock_mhz: int
    flops_per_cycle_per_unit: FrozenMap[str, int]
    memory_bytes_per_second: int
    l2_bytes_per_second: int

    def peak_flops(self, dtype: str, *, units: int = 0, clock_mhz: int = 0) -> float | None:
        """Operations per second of the whole device for ``dtype``; None when not known.

        ``units`` and ``clock_mhz``, when given, replace the spec's figures.
        """
        per_cycle = self.flops_per_cycle_per_unit.get(dtype, 0)
        rate = float(per_cycle) * (units or self.units) * (clock_mhz or self.clock_mhz) * 1e6
        return rate or None


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Options of the compiler.

    ``flags`` are for GCC, Clang, NVRTC or hiprtc, in order; ``gpu_arch`` is the offload or
    NVRTC architecture (empty on CPUs); ``zig_cpu`` is the value of ``-mcpu=`` that takes the
    place of a CPU's ``-march=`` flag where the compiler is zig, which spells levels its own way.
    """

    flags: tuple[str, ...]
    gpu_arch: str
    zig_cpu: str

    @property
    def zig_flags(self) -> tuple[str, ...]:
        """``flags`` as ``zig c++`` wants them; the same where ``zig_cpu`` is empty."""
        if not self.zig_cpu:
            return self.flags
        return tuple(f"-mcpu={self.zig_cpu}" if flag.startswith("-march=") else flag for flag in self.flags)

    def retargeted(self, gpu_arch: str) -> Toolchain:
        """The same flags for a sibling architecture that runs the same sources."""
        flags = tuple(flag.replace(self.gpu_arch, gpu_arch) for flag in self.flags)
        return dataclasses.replace(self, flags=flags, gpu_arch=gpu_arch)


@dataclass(frozen=True, slots=True)
class Match:
    """How a machine is recognised as this architecture.

    CPUs: ``machines`` (``uname -m`` spellings) and the ``cpu_flags`` that must all be present.
    HIP: ``gcn_arch_names`` that run the same sources. CUDA: ``compute_capability``, and
    whether later devices can run the same sources (``forward_compatible``).
    """

    machines: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    gcn_arch_names: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    forward_compatible: bool = False


@dataclass(frozen=True, slots=True)
class Feature:
    """An optional part of an architecture: what proves it present and what it changes.

    Tables replace the base entry of the same key; the others stay.
    """

    name: str
    description: str
    cpu_flags: tuple[str, ...]
    compiler_flags: tuple[str, ...]
    warp_tiles: TileTable
    preshuffle_warp_tiles: TileTable
    tile_instructions: FrozenMap[str, FrozenMap[Triple, str]]
    flops_per_cycle_per_unit: FrozenMap[str, int]


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """Everything that generation, validation and cost models may know of an architecture.

    Sizes are bytes. Triples are (m, n, k). Tables are keyed ``{a}_{b}_{acc}``. Field meanings
    are given in full in ``schema.json`` and ``docs/adding-an-arch.md``.
    """

    name: str
    kind: str
    family: str
    target_family: str
    vendor: str
    description: str
    wave_size: int
    vector_bytes: int
    vector_registers: int
    max_vgprs: int
    max_threads_per_workgroup: int
    register_file: int
    lds_banks: int
    lds_bytes: int
    lds_l2_fraction: float
    caches: Caches
    fp8_encoding: str
    features: tuple[str, ...]
    optional_features: FrozenMap[str, Feature]
    instructions: FrozenMap[str, Instruction]
    waves: tuple[Triple, ...]
    warp_tiles: TileTable
    preshuffle_warp_tiles: TileTable
    tile_instructions: FrozenMap[str, FrozenMap[Triple, str]]
    bulk_copy: BulkCopy | None
    pipelines: FrozenMap[str, Pipeline]
    preshuffle_pipelines: tuple[str, ...]
    unsupported_traits: tuple[Trait, ...]
    throughput: Throughput
    rates: Rates | None
    toolchain: Toolchain
    match: Match
    operations: FrozenMap[str, object]
    _sections: dict[str, object] = field(default_factory=dict, init=False, compare=False, repr=False)

    def section(self, operation: str, read: Callable[[Fields], Section]) -> Section | None:
        """Section that ``operations`` has for ``operation``, as ``read`` types it; None if there is none.

        It is read once; ``read`` raises ``SpecError`` for mistakes.
        """
        found = self._sections.get(operation, self)
        if found is self:
            record = self.operations.get(operation)
            fields = None if record is None else Fields(record, f"{self.name}.json", f"operations.{operation}")
            found = self._sections[operation] = None if fields is None else read(fields)
        return cast("Section | None", found)

    @property
    def id(self) -> str:
        """Name and enabled features, ``name+feature+feature``; ``load`` accepts it."""
        return "+".join((self.name, *self.features))

    def acc_dtype(self, a: str, b: str) -> str | None:
        """Accumulator dtype for A of dtype ``a`` and B of ``b``; None if the arch lacks the pair."""
        prefix = f"{a}_{b}_"
        return next((k.removeprefix(prefix) for k in self.warp_tiles if k.startswith(prefix)), None)

    def pipeline(self, name: str) -> Pipeline:
        """The pipeline called ``name``, or ``UnknownPipelineError``."""
        try:
            return self.pipelines[name]
        except KeyError:
            raise UnknownPipelineError(name, self.pipelines) from None

    def lds_budget(self, pipeline: str) -> int:
        """Bytes that one stage of A plus B may fill: ``floor(lds_bytes * lds_fraction)``."""
        return math.floor(self.lds_bytes * self.pipeline(pipeline).lds_fraction)

    def warp_tiles_for(self, key: str, pipeline: str) -> tuple[Triple, ...]:
        """Warp tiles of dtype key ``key`` that ``pipeline`` can use, in table order.

        Preshuffle pipelines read the preshuffle table; a pipeline tied to some instructions
        (``ws`` to ``wgmma``) sees only their tiles. Empty when the arch lacks the key.
        """
        allowed = self.pipeline(pipeline).instructions
        table = self.preshuffle_warp_tiles if pipeline in self.preshuffle_pipelines else self.warp_tiles
        issued_by = self.tile_instructions.get(key, _NONE)
        return tuple(tile for tile in table.get(key, ()) if issued_by[tile] in allowed)

    def instruction(self, key: str, warp_tile: Triple) -> Instruction | None:
        """The instruction behind ``warp_tile`` for dtype key ``key``; None if it has none."""
        name = self.tile_instructions.get(key, _NONE).get(warp_tile)
        return None if name is None else self.instructions[name]

    def threads_per_workgroup(self, pipeline: str, wave: Triple, key: str, warp_tile: Triple) -> int:
        """Threads to launch per workgroup: waves times their size, plus producer threads."""
        instruction = self.instruction(key, warp_tile)
        wave_threads = instruction.wave_threads if instruction else self.wave_size
        return math.prod(wave) * wave_threads + self.pipeline(pipeline).extra_threads

    def registers_per_thread(self, threads: int) -> int:
        """Registers that each of ``threads`` threads of a workgroup may hold when it has a unit to itself."""
        if not self.register_file or threads <= 0:
            return self.max_vgprs
        # The hardware hands registers out in blocks of eight to each thread.
        return min(self.max_vgprs, self.register_file // threads // 8 * 8)

    def trait_refusal(self, pipeline: str, epilogue: str, scheduler: str) -> str | None:
        """Why the combination cannot be generated, or None when it can."""
        if pipeline not in self.pipelines:
            return str(UnknownPipelineError(pipeline, self.pipelines))
        offered = self.pipelines[pipeline]
        for trait in self.unsupported_traits:
            if (trait.pipeline, trait.epilogue, trait.scheduler) == (pipeline, epilogue, scheduler):
                return trait.reason
        return combination_reason(offered, epilogue, scheduler)

    def supports_trait(self, pipeline: str, epilogue: str, scheduler: str) -> bool:
        """True if the combination of pipeline, epilogue and scheduler can be generated."""
        return self.trait_refusal(pipeline, epilogue, scheduler) is None

    def with_features(self, features: Iterable[str]) -> ArchSpec:
        """This spec with ``features`` enabled beside those that already are.

        Raises ``UnknownFeatureError`` for one that the architecture does not offer.
        """
        names = set(self.features)
        for name in features:
            if name not in self.optional_features:
                raise UnknownFeatureError(name, self.optional_features)
            names.add(name)
        spec = self
        # The loader refuses features that change the same entry, so order cannot matter to the
        # tables. Compiler flags are rebuilt, so that one set of features gives one command line.
        for name in names - set(self.features):
            spec = _apply(spec, self.optional_features[name])
        added = sum(len(self.optional_features[name].compiler_flags) for name in self.features)
        flags = self.toolchain.flags[: len(self.toolchain.flags) - added]
        for name in sorted(names):
            flags += self.optional_features[name].compiler_flags
        return dataclasses.replace(
            spec,
            features=tuple(sorted(names)),
            toolchain=dataclasses.replace(self.toolchain, flags=flags),
        )

    def with_caches(self, caches: Caches) -> ArchSpec:
        """This spec with a machine's real caches; a CPU's ``lds_bytes`` follows its L2."""
        lds = self.lds_bytes
        if self.lds_l2_fraction:
            lds = math.floor(caches.l2_bytes * self.lds_l2_fraction)
        return dataclasses.replace(self, caches=caches, lds_bytes=lds)

    def with_device(
        self,
        *,
        lds_bytes: int | None = None,
        units: int | None = None,
        clock_mhz: int | None = None,
        memory_bytes_per_second: int | None = None,
    ) -> ArchSpec:
        """This spec with what an opened device reports of itself in place of the defaults."""
        given = {
            "units": units,
            "clock_mhz": clock_mhz,
            "memory_bytes_per_second": memory_bytes_per_second,
        }
        known = {key: value for key, value in given.items() if value is not None}
        return dataclasses.replace(
            self,
            lds_bytes=self.lds_bytes if lds_bytes is None else lds_bytes,
            throughput=dataclasses.replace(self.throughput, **known),  # type: ignore[arg-type]
        )

    def to_dict(self) -> dict[str, object]:
        """The resolved spec as plain JSON types, ``id`` first, for display and export."""
        body = plain(self)
        assert isinstance(body, dict)
        body.pop("tile_instructions")
        return {"id": self.id, **body}


def combination_reason(pipeline: Pipeline, epilogue: str, scheduler: str) -> str | None:
    """Why a pipeline's own lists exclude the combination, or None when they allow it."""
    if scheduler not in pipeline.schedulers:
        only = ", ".join(pipeline.schedulers)
        return f"pipeline {pipeline.name} takes scheduler {only}, not {scheduler}"
    if epilogue not in pipeline.epilogues:
        only = ", ".join(pipeline.epilogues)
        return f"pipeline {pipeline.name} takes epilogue {only}, not {epilogue}"
    return None


def plain(value: object) -> object:
    """``value`` with dataclasses and frozen maps turned into dicts, and tuples into lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, FrozenMap):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _apply(spec: ArchSpec, feature: Feature) -> ArchSpec:
    rates = spec.throughput.flops_per_cycle_per_unit.updated(feature.flops_per_cycle_per_unit)
    return dataclasses.replace(
        spec,
        warp_tiles=spec.warp_tiles.updated(feature.warp_tiles),
        preshuffle_warp_tiles=spec.preshuffle_warp_tiles.updated(feature.preshuffle_warp_tiles),
        tile_instructions=spec.tile_instructions.updated(feature.tile_instructions),
        throughput=dataclasses.replace(spec.throughput, flops_per_cycle_per_unit=rates),
    )
