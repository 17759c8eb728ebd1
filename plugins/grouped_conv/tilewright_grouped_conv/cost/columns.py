"""Traits of many products as arrays: their analytical times, and the features that learned models see.

``times`` is ``predict_conv`` for all kernels at once, where no operand is copied; a test holds them equal. Trainer and
planner call the same ``features``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL, form_of
from tilewright_grouped_conv.cost import im2col as gathered
from tilewright_grouped_conv.cost.gpu import (
    FILL_SECONDS,
    JOIN_SECONDS,
    L2_BYTES_PER_CYCLE,
    L2_SHARE,
    LAUNCH_SECONDS,
    MEMORY_SHARE,
    MOST_RESIDENT,
    epilogue_cycles,
    resident_of,
    step_cycles,
)
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Specialization
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.tabled import FieldTable, as_features
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import consumers
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["FEATURES", "TABLE", "features", "table_of", "times"]

Floats = npt.NDArray[np.float64]
Table = Mapping[str, npt.NDArray[Any]]

TABLE = FieldTable(
    pipeline=(*IM2COL.names, "compv3", "compv4"), scheduler=("pingpong", "cooperative", "intrawave"),
    epilogue=(Epilogue.CSHUFFLE, Epilogue.DEFAULT), tile=3, wave=3, warp_tile=3, vector_sizes=3, num_wave_groups=0,
    two_stage=0, explicit_gemm=0, specialization=(Specialization.DEFAULT, Specialization.FILTER1X1_STRIDE1_PAD0),
    split_k=0, stages=0, block_per_cu=0,
)  # fmt: skip
_STEPS = tuple(f"step.{together}" for together in range(1, MOST_RESIDENT + 1))
_SEEN = ("pipeline", "scheduler", "epilogue", "tile.0", "tile.1", "tile.2", "wave.0", "wave.1", "two_stage",
         "explicit_gemm", "split_k", "stages", "resident")  # fmt: skip
_NUMBERS = (
    "images", "cg", "kg", "groups", "pixels_in", "pixels_out", "taps", "stride", "m", "n", "k", "phases", "pointwise",
    "fused", "work", "moved",
)  # fmt: skip
_PARTS = (
    "log_seconds", "compute", "ending", "l2", "memory", "join", "log_tiles", "log_work", "rounds", "fill", "use_m",
    "use_n", "log_steps",
)  # fmt: skip
FEATURES = (*_NUMBERS, *_SEEN, *_PARTS)
"""Names of the features, in their order: a schema, whose digest model files carry."""


def table_of(configs: Sequence[ConvConfig], arch: ArchSpec) -> Table:
    """The columns of some kernels: their fields, and what follows from them on an arch."""
    found = TABLE.columns(configs)
    derived = np.array([_derived(config, arch) for config in configs], np.float64).reshape(len(configs), 6)
    names = (*_STEPS, "resident", "owners")
    return {**found, **{name: np.ascontiguousarray(derived[:, place]) for place, name in enumerate(names)}}


@lru_cache(maxsize=8192)
def _derived(config: ConvConfig, arch: ArchSpec) -> tuple[float, ...]:
    if form_of(config.pipeline) is IM2COL:
        step = gathered.im2col_step_cycles(config, arch)
        return (step,) * MOST_RESIDENT + (1.0, 1.0 if config.scheduler == "pingpong" else float(consumers(config)))
    steps = (step_cycles(config, arch, together) for together in range(1, MOST_RESIDENT + 1))
    return (*steps, float(resident_of(config, arch)), 1.0)


def _slices(steps: Floats, split: Floats) -> Floats:
    """Slices that are not empty; ``tiles.footprint.cpu.slices`` for arrays."""
    length = np.maximum(np.ceil(steps / split), 1.0)
    found: Floats = np.where(split > 1, np.ceil(steps / length), 1.0)
    return found


def _phases(problem: ConvProblem) -> list[Phase]:
    return [phase for phase in problem.phases(False) if phase.m and phase.n and phase.batch]


def _parts(problem: ConvProblem, table: Table, device: DeviceInfo) -> dict[str, Floats]:
    """Every part of the estimate of every kernel."""
    phases = _phases(problem)
    engine = table["pipeline"] == 0
    found = {name: np.zeros(len(engine)) for name in _NAMES}
    for rows, of in ((np.flatnonzero(engine), _gathered), (np.flatnonzero(~engine), _products)):
        if len(rows):
            part = of(problem, {name: column[rows] for name, column in table.items()}, device, phases)
            for name, values in part.items():
                found[name][rows] = values
    shown = np.maximum(np.maximum(found["compute"], found["l2"]), found["memory"])
    behind = 0.15 * np.minimum(found["compute"], np.maximum(found["l2"], found["memory"]))
    found["seconds"] = shown + behind + found["launch"] + found["ending"] + found["join"]
    return found


_NAMES = ("launch", "compute", "ending", "l2", "memory", "join", "tiles", "work", "steps")


def _gathered(problem: ConvProblem, table: Table, device: DeviceInfo, phases: list[Phase]) -> dict[str, Floats]:
    """``im2col_parts``."""
    arch, geometry = device.arch, problem.geometry
    clock, units, line = clock_of(arch), units_of(device), gathered.LINE_BYTES // problem.dtype_in.bytes
    tile_m, tile_n, tile_k = table["tile.0"], table["tile.1"], table["tile.2"]
    pingpong = table["scheduler"] == 0
    weights = problem.direction is Direction.BACKWARD_WEIGHT
    channels = geometry.kg if problem.direction is Direction.BACKWARD_DATA else geometry.cg
    cycles, join, tiles, total = (np.zeros(len(tile_m)) for _ in range(4))
    for phase in phases:
        if weights:
            whole = geometry.cg % line == 0
            n, batch = (geometry.cg * phase.taps, phase.batch) if whole else (geometry.cg, phase.taps)
            steps = np.ceil(phase.k / tile_k)
        else:
            n, batch, steps = phase.n, phase.batch, np.full(len(tile_m), float(phase.taps * -(-channels // line)))
        if not phase.taps:
            continue  # pixels that no tap reaches; a kernel of this pipeline does not take several phases
        own = np.ceil(phase.m / tile_m) * np.ceil(n / tile_n) * batch
        split = _slices(steps, table["split_k"])
        work, each_steps = own * split, np.ceil(steps / split)
        each, store = np.ceil(work / units), tile_m * tile_n * gathered.STORE_CYCLES
        cycles += each * each_steps * table["step.1"] + np.where(pingpong, store, each * store)
        joined = (1 + split) * tile_m * tile_n * 4.0 / (gathered.PART_BYTES_PER_CYCLE * clock * table["owners"])
        join += np.where(split > 1, joined + work * tile_m * tile_n * 8.0 / gathered.PARTS_BYTES_PER_SECOND, 0.0)
        tiles += own
        total += work * each_steps
    moved = sum(item.desc.size * item.desc.dtype.bytes for item in problem.operands)
    rate = (arch.throughput.memory_bytes_per_second or 1e12) * gathered.MEMORY_SHARE
    ones = np.ones(len(tile_m))
    return {
        "launch": (gathered.LAUNCH_SECONDS + gathered.FILL_CYCLES / clock) * ones, "compute": cycles / clock,
        "memory": moved / rate * ones, "join": join, "tiles": tiles, "work": total,
        "steps": total / np.maximum(tiles, 1.0),
    }  # fmt: skip


def _products(problem: ConvProblem, table: Table, device: DeviceInfo, phases: list[Phase]) -> dict[str, Floats]:
    """``product_parts``."""
    arch = device.arch
    clock, units, split = clock_of(arch), units_of(device), table["split_k"]
    m, n, k, resident = table["tile.0"], table["tile.1"], table["tile.2"], table["resident"]
    size, data = problem.dtype_in.bytes, problem.direction is Direction.BACKWARD_DATA
    tiles, work, near = (np.zeros(len(m)) for _ in range(3))
    for phase in phases:
        own = np.ceil(phase.m / m) * np.ceil(phase.n / n) * phase.batch
        taps = max(phase.taps, 1)
        along = taps * np.ceil(phase.k // taps / k) if data else np.maximum(np.ceil(phase.k / k), 1.0)
        along = np.where(table["explicit_gemm"] > 0, np.maximum(np.ceil(phase.k / k), 1.0), along)
        each = np.ceil(along / split)
        tiles += own * split
        work += own * split * each
        near += own * split * each * k * (m + n) * size
    rounds = np.ceil(tiles / (units * resident))
    busiest = np.where(tiles > units * resident, rounds * resident, np.ceil(tiles / units))
    together = np.maximum(np.minimum(resident, busiest), 1.0).astype(int) - 1
    step = np.stack([table[name] for name in _STEPS])[together, np.arange(len(m))]
    steps = work / np.maximum(tiles, 1.0)
    l2 = arch.throughput.l2_bytes_per_second or L2_BYTES_PER_CYCLE * clock * units
    memory = (arch.throughput.memory_bytes_per_second or 1e12) * MEMORY_SHARE
    launch = LAUNCH_SECONDS[arch.kind]
    sums = sum(phase.batch * phase.m * phase.n for phase in phases) * 4.0
    staged = launch + 2.0 * sums * split / max(memory, l2 * L2_SHARE)
    shared = JOIN_SECONDS + (1.0 + split) * m * n * 4.0 / (0.6 * L2_BYTES_PER_CYCLE * clock)
    moved = sum(item.desc.size * item.desc.dtype.bytes for item in problem.operands)
    ones = np.ones(len(m))
    return {
        "launch": (launch + FILL_SECONDS) * ones, "compute": busiest * steps * step / clock,
        "ending": rounds * _endings(problem, table) / clock, "l2": near / (l2 * L2_SHARE),
        "memory": moved / memory * ones,
        "join": np.where(split > 1, np.where(table["two_stage"] > 0, staged, shared), 0.0),
        "tiles": tiles / split, "work": work, "steps": steps,
    }  # fmt: skip


def _endings(problem: ConvProblem, table: Table) -> Floats:
    """``epilogue_cycles`` of what the problem asks, by tile and way of storing."""
    mapped = problem.direction is Direction.BACKWARD_DATA and len(problem.phases(False)) > 1
    found = np.empty(len(table["tile.0"]))
    for place in range(len(found)):
        found[place] = epilogue_cycles(
            (int(table["tile.0"][place]), int(table["tile.1"][place])), staged=table["epilogue"][place] == 0,
            mapped=mapped, operands=problem.num_d + problem.accumulate, bias=problem.dtype_bias is not None,
            size=problem.dtype_out.bytes,
        )  # fmt: skip
    return found


def times(problem: ConvProblem, table: Table, device: DeviceInfo) -> Floats:
    """Analytical seconds of every kernel; infinite for what cannot win: tiles of which most lies outside the product,
    and more slices than steps or than the device has room for.
    """
    phases = _phases(problem)
    if not phases:
        return np.full(len(table["tile.0"]), np.inf)
    m, n = max(phase.m for phase in phases), max(phase.n for phase in phases)
    engine, split = table["pipeline"] == 0, table["split_k"]
    parts = _parts(problem, table, device)
    out = (table["tile.0"] > 2.0 * max(m, 64)) | (table["tile.1"] > 2.0 * max(n, 32))
    out |= (split > 1) & ((parts["steps"] < 2) | (parts["tiles"] * split > 4.0 * units_of(device)))
    if len(phases) > 1:
        out |= engine | (split > 1)
    if not problem.geometry.is_dense_pointwise:
        out |= table["explicit_gemm"] > 0
    if problem.split_k:
        out |= split != problem.split_k
    found: Floats = np.where(out, np.inf, parts["seconds"])
    return found


def features(problem: ConvProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float32]:
    """One row of ``FEATURES`` for each kernel."""
    geometry, largest = problem.geometry, max(problem.phases(False), key=lambda phase: phase.m * phase.n * phase.k)
    parts, units = _parts(problem, table, device), units_of(device)
    seconds, slices = parts["seconds"], parts["tiles"] * table["split_k"]
    rounds = np.maximum(slices, 1.0) / (units * table["resident"])
    values = {
        "log_seconds": np.log2(seconds), **{name: parts[name] / seconds for name in _PARTS[1:6]},
        "log_tiles": np.log2(np.maximum(parts["tiles"], 1.0)), "log_work": np.log2(np.maximum(parts["work"], 1.0)),
        "rounds": rounds, "fill": rounds / np.ceil(rounds),
        "use_m": largest.m / (np.ceil(largest.m / table["tile.0"]) * table["tile.0"]),
        "use_n": largest.n / (np.ceil(largest.n / table["tile.1"]) * table["tile.1"]),
        "log_steps": np.log2(np.maximum(parts["steps"], 1.0)),
    }  # fmt: skip
    numbers = {
        "images": geometry.n, "cg": geometry.cg, "kg": geometry.kg, "groups": geometry.groups,
        "pixels_in": geometry.in_pixels, "pixels_out": geometry.out_pixels, "taps": geometry.taps,
        "stride": max(geometry.stride), "m": largest.m, "n": largest.n, "k": largest.k,
        "phases": len(problem.phases(False)), "pointwise": geometry.is_dense_pointwise,
        "fused": problem.num_d + (problem.dtype_bias is not None), "work": geometry.flops,
        "moved": sum(item.desc.nbytes for item in problem.operands),
    }  # fmt: skip
    assert (tuple(numbers), tuple(values)) == (_NUMBERS, _PARTS)
    return as_features({name: float(value) for name, value in numbers.items()}, table, _SEEN, values)
