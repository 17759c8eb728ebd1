"""Traits of many warp-specialised kernels as arrays: their analytical times, and the features that learned models see.

``times`` is ``predict_warp_specialised`` for all kernels at once; a test holds them equal. Trainer and planner call the
same ``features``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.cuda import (
    ALONE,
    FILL_SECONDS,
    L2_BYTES_PER_CYCLE,
    L2_SHARE,
    LAUNCH_SECONDS,
    LOAD_SECONDS,
    MEMORY_BYTES_PER_CYCLE,
    MEMORY_SHARE,
    epilogue_cycles,
    join_seconds,
    resident_of,
)
from tilewright_gemm.cost.tiles import shapes_of
from tilewright_gemm.cost.warp_specialised import step_cycles, storing_threads
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import stages_of

__all__ = ["COLUMNS", "FEATURES", "features", "table_of", "times"]

Floats = npt.NDArray[np.float64]
Table = Mapping[str, npt.NDArray[Any]]

COLUMNS = (
    "tile_m", "tile_n", "tile_k", "wave_m", "wave_n", "cluster_m", "cluster_n", "cluster_k", "pingpong", "swapped",
    "stages", "persistent", "stream", "staged", "split", "promote",
    "ring", "resident", "step", "ending", "join",
)  # fmt: skip
"""The fields of a kernel, then what follows from them: stages of its ring, workgroups of a unit, and times."""

_TIMED = (
    "tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "cluster_k", "pingpong", "persistent", "stream", "split",
    "ring", "resident", "step", "ending", "join",
)  # fmt: skip
"""Columns that times follow from."""

FEATURES = (
    "log_m", "log_n", "log_k", "log_count", "log_tile_m", "log_tile_n", "log_tile_k", "waves", "cluster_m",
    "cluster_n", "cluster_k", "pingpong", "swapped", "ring", "resident", "persistent", "stream", "staged", "log_split",
    "promote", "bytes_a", "bytes_c", "log_tiles", "log_slices", "rounds", "fill", "use_m", "use_n", "use_k",
    "log_steps",
    "tiles_m", "tiles_n", "log_busiest", "intensity", "log_seconds", "compute", "ending", "l2", "memory", "join",
    "line_c", "line_k", "grid_share", "log_flight",
)  # fmt: skip
"""Names of the features, in their order: a schema, whose digest model files carry."""


def table_of(configs: Sequence[GemmConfig], arch: ArchSpec) -> Table:
    """The columns of some kernels, in their order."""
    rows = np.array([_row(config, arch) for config in configs], np.float64).reshape(len(configs), len(COLUMNS))
    return {name: np.ascontiguousarray(rows[:, place]) for place, name in enumerate(COLUMNS)}


@lru_cache(maxsize=8192)
def _row(config: GemmConfig, arch: ArchSpec) -> tuple[float, ...]:
    clock = clock_of(arch)
    return (
        *config.tile, *config.wave[:2], *config.cluster,
        config.scheduler == "pingpong", config.transpose_c, config.stages, config.persistent,
        config.reduction is not Reduction.NONE, config.epilogue is Epilogue.CSHUFFLE, config.split_k, config.promote,
        stages_of(config, arch),
        1 if config.persistent else resident_of(config, arch),
        step_cycles(config, arch),
        epilogue_cycles(config, storing_threads(config, arch)),
        join_seconds(config, clock),
    )  # fmt: skip


def _parts(problem: GemmProblem, table: Table, device: DeviceInfo) -> dict[str, Floats]:
    """Every intermediate of the estimate; see ``predict_cuda``."""
    arch, units, clock = device.arch, units_of(device), clock_of(device.arch)
    tile_m, tile_n, tile_k = table["tile_m"], table["tile_n"], table["tile_k"]
    cluster_m, cluster_n, split = table["cluster_m"], table["cluster_n"], table["split"]
    size = problem.dtype_a.bytes
    tiles: Any = np.zeros(len(tile_m))
    work: Any = np.zeros(len(tile_m))
    near: Any = np.zeros(len(tile_m))
    far = 0.0
    for m, n, k, count in shapes_of(problem):
        own = np.ceil(m / (tile_m * cluster_m)) * np.ceil(n / (tile_n * cluster_n)) * cluster_m * cluster_n * count
        tiles = tiles + own
        work = work + own * np.ceil(np.ceil(k / tile_k) / split)
        a = m * k * np.ceil(np.ceil(n / tile_n) / cluster_n)
        b = n * k * np.ceil(np.ceil(m / tile_m) / cluster_m)
        near = near + (a + b) * size * count
        far += ((m + n) * k * size + m * n * problem.dtype_c.bytes) * count
    slices, steps = tiles * split, work / np.maximum(tiles, 1.0)
    stream, step, pingpong = table["stream"] > 0, table["step"], table["pingpong"] > 0
    resident = table["resident"]
    group = cluster_m * cluster_n * table["cluster_k"]
    busiest = np.ceil(slices / group / np.maximum(np.floor(units * resident / group), 1.0))
    grid = np.maximum(np.floor(units / group), 1.0) * group
    main = np.where(stream, slices * steps * step / grid, busiest * resident * steps * step)
    ends = np.where(stream, 2.0, busiest)
    busiest = np.where(stream, np.maximum(slices / units, 1.0), busiest)
    ends = np.where(pingpong, 1.0, ends)
    main = np.where(pingpong & (busiest == 1), main * ALONE, main)
    compute, ending = main / clock, ends * table["ending"] / clock
    flight = table["ring"] * (tile_m + tile_n) * tile_k * size
    active = np.minimum(slices, units)
    per_unit = np.minimum(L2_BYTES_PER_CYCLE * clock, flight / LOAD_SECONDS)
    rates = arch.throughput
    l2 = near / np.maximum(np.minimum(per_unit * active, (rates.l2_bytes_per_second or 1e13) * L2_SHARE), 1.0)
    reach = np.minimum(
        np.minimum(per_unit, MEMORY_BYTES_PER_CYCLE * clock) * active,
        (rates.memory_bytes_per_second or 1e12) * MEMORY_SHARE,
    )
    memory = far / np.maximum(reach, 1.0)
    loads = np.maximum(l2, memory)
    seconds = LAUNCH_SECONDS + FILL_SECONDS + np.maximum(compute + ending, loads) + table["join"]
    seconds = seconds + 0.15 * np.minimum(compute, loads)
    return {
        "seconds": seconds, "compute": compute, "ending": ending, "l2": l2, "memory": memory, "tiles": tiles,
        "slices": slices, "steps": steps, "busiest": busiest, "flight": flight,
    }  # fmt: skip


def times(problem: GemmProblem, table: Table, device: DeviceInfo) -> Floats:
    """Analytical seconds of every kernel; infinite for what cannot win: tiles of which most lies outside the problem,
    more slices of K than steps or than the device has room for, and workgroups that claim tiles where each has one.
    """
    largest, units = problem.largest, units_of(device)
    split, stream, swapped = table["split"], table["stream"] > 0, table["swapped"] > 0
    steps = np.ceil(largest.k / table["tile_k"])
    out = table["tile_m"] * table["cluster_m"] >= 2.0 * np.maximum(largest.m, np.where(swapped, 8, 64))
    out |= table["tile_n"] * table["cluster_n"] >= 2.0 * np.maximum(largest.n, np.where(swapped, 64, 32))
    out |= (split > 1) & (split > steps / 2)
    out |= stream & ((steps < 12) | (problem.is_batched or problem.grouped))
    if problem.grouped:
        out |= split > 1
    elif problem.split_k:
        out |= (split != problem.split_k) | stream
    # The rest of the work is for those alone that are left.
    rows = np.flatnonzero(~out)
    some = {name: table[name][rows] for name in _TIMED}
    parts = _parts(problem, some, device)
    split, stream, slices = some["split"], some["stream"] > 0, parts["slices"]
    out = (split > 1) & (slices > 3.0 * units)
    out |= stream & (parts["tiles"] < units / 2)
    out |= (some["persistent"] > 0) & (some["pingpong"] == 0) & ~stream & (slices <= units)
    found: Floats = np.full(len(table["split"]), math.inf)
    found[rows] = np.where(out, math.inf, parts["seconds"])
    return found


def features(problem: GemmProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float32]:
    """One row of ``FEATURES`` for each kernel."""
    parts = _parts(problem, table, device)
    units, largest = units_of(device), problem.largest
    m, n, k = largest.m, largest.n, largest.k
    count = sum(item[3] for item in shapes_of(problem))
    tile_m, tile_n, tile_k = table["tile_m"], table["tile_n"], table["tile_k"]
    tiles_m, tiles_n = np.ceil(m / tile_m), np.ceil(n / tile_n)
    rounds = parts["slices"] / (units * table["resident"])
    seconds = parts["seconds"]
    ones = np.ones(len(tile_m))
    nbytes = ((m + n) * k * problem.dtype_a.bytes + m * n * problem.dtype_c.bytes) * count
    values = (
        math.log2(max(m, 1)) * ones, math.log2(max(n, 1)) * ones, math.log2(max(k, 1)) * ones, math.log2(count) * ones,
        np.log2(tile_m), np.log2(tile_n), np.log2(tile_k), table["wave_m"] * table["wave_n"], table["cluster_m"],
        table["cluster_n"], table["cluster_k"], table["pingpong"], table["swapped"], table["ring"], table["resident"],
        table["persistent"], table["stream"], table["staged"], np.log2(table["split"]), table["promote"],
        problem.dtype_a.bytes * ones, problem.dtype_c.bytes * ones, np.log2(parts["tiles"]), np.log2(parts["slices"]),
        rounds, rounds / np.ceil(rounds), m / (tiles_m * tile_m), n / (tiles_n * tile_n),
        k / (np.ceil(k / tile_k) * tile_k), np.log2(parts["steps"]), tiles_m, tiles_n, np.log2(parts["busiest"]),
        math.log2(max(problem.flops / max(nbytes, 1), 1e-3)) * ones, np.log2(seconds), parts["compute"] / seconds,
        parts["ending"] / seconds, parts["l2"] / seconds, parts["memory"] / seconds, table["join"] / seconds,
        (n * problem.dtype_c.bytes % 128 == 0) * ones, (k * problem.dtype_a.bytes % 128 == 0) * ones,
        np.minimum(parts["slices"] / units, 1.0), np.log2(parts["flight"]),
    )  # fmt: skip
    found: npt.NDArray[np.float32] = np.stack(values, axis=1).astype(np.float32)
    return found
