"""Cost of warp-specialised kernels. Tensor cores and exponentials bind them at once, so that what was measured says
more
than what each would take alone.
"""

from __future__ import annotations

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.config.gradients import specialised_gradient
from tilewright_fmha.config.warp_specialised import draws_tiles, has_own_results
from tilewright_fmha.cost.gpu import LAUNCH_SECONDS, more_steps
from tilewright_fmha.launch.splits import choose_splits, share_workgroups, shares_keys, work_items
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import MaskKind, Scheduling
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.units import unit_efficiency, units_of
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = ["predict_warp_specialised"]

_REACHED = {
    (64, 3, 128, True): (0.53, 0.53), (64, 2, 192, True): (0.455, 0.46), (64, 2, 128, True): (0.44, 0.45),
    (64, 1, 128, False): (0.31, 0.31), (128, 2, 176, False): (0.61, 0.63), (128, 2, 160, True): (0.615, 0.61),
    (128, 2, 128, True): (0.62, 0.615), (128, 2, 128, False): (0.645, 0.655), (128, 1, 128, False): (0.4, 0.4),
    (256, 2, 80, False): (0.73, 0.73), (256, 2, 64, False): (0.63, 0.67),
}  # fmt: skip
"""Part of the peak rate, without a mask and with one, by elements of v, consumers, columns of a block and whether
consumers take turns: measured on an H200.
"""
_OTHER, _ALONE = 0.5, 0.7
"""Where nothing was measured; and of one consumer, whose exponentials nothing else hides."""
_TILE_SECONDS, _LATE_SECONDS, _ABREAST_SECONDS = 1.5e-6, 1.5e-6, 1.0e-6
"""Cycles that a tile takes besides its blocks; where results have no room of their own, so that the next queries
come late;
where two consumers do not take turns, and so are at the same step.
"""
_DRAWN = {1: 1.1, 2: 1.02}
"""How much faster kernels for few rows draw keys and values from memory than portable ones do, by bytes of an element:
measured on an H200.
"""
_GRADIENTS = {64: (0.41, 0.38), 128: (0.5, 0.53)}
"""Part of the peak rate of products of gradients, without a mask and with one, by elements of a head: measured on an
H200.
"""
_FIXED_ORDER = 0.92
"""Part of that where dQ is added in a fixed order."""
_GRADIENT_LAUNCHES = 3
_LAST = 0.3
"""Tiles that differ in length are drawn: part of a tile for which some units wait at the end."""


def predict_warp_specialised(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan, and what they are made of."""
    if specialised_gradient(config):
        return _gradients(problem, config, device)
    if decodes(config):
        return _few_rows(problem, config, device, LAUNCH_SECONDS)
    if splits_tiles(config):
        return _parts(problem, config, device, more_steps(problem), LAUNCH_SECONDS)
    return _forward(problem, config, device, more_steps(problem), LAUNCH_SECONDS)


def _few_rows(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, launch: float) -> Prediction:
    """Rates of kernels for few rows: memory binds them, or, as every tile of rows reads all keys, the second-level
    cache. Few
    pieces do not draw the full rate.
    """
    rows, throughput = problem.seq_q * problem.group, device.arch.throughput
    splits = choose_splits(problem, config, device)
    pieces = work_items(problem, config, device) * splits
    if shares_keys(problem, config):
        pieces = max(pieces, share_workgroups(problem, config, device))
    keys = problem.batch * problem.heads_k * problem.seq_k * (problem.hdim_q + problem.hdim_v) * config.kv.bytes
    partial = 8.0 * splits * problem.batch * problem.heads_k * rows * config.hdim[1] if splits > 1 else 0.0
    rate = (throughput.memory_bytes_per_second or 1e12) * _DRAWN[config.kv.bytes]
    drawn = min(1.0, 1.5 * pieces / units_of(device))
    memory = (problem.bytes_moved + partial) / (rate * drawn)
    cached = ceil_div(max(rows, 1), config.m0) * keys / ((throughput.l2_bytes_per_second or rate) * drawn)
    return Prediction(max(memory, cached) + launch, {"memory": memory, "l2": cached, "launch": launch})


def _forward(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, steps: float, launch: float) -> Prediction:
    """Seconds of the whole plan. ``steps``: vector operations on a score besides the usual; ``launch``: seconds."""
    arch, (q, v) = device.arch, config.hdim
    units = units_of(device)
    blocks = problem.batch * problem.heads_q * ceil_div(max(problem.seq_q, 1), config.m0)
    pairs = problem.batch * problem.heads_q * padded(max(problem.seq_q, 1), config.m0)
    every = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    share = min((problem.pairs / every if every else 1.0) + config.n0 / max(problem.seq_k, 1), 1.0)
    seen = pairs * padded(max(problem.seq_k, 1), config.n0) * share
    turns = config.scheduler is Scheduling.PINGPONG
    masked = config.mask is not MaskKind.NONE
    other = (_OTHER * (_ALONE if config.waves == 1 else 1.0),) * 2
    reached = _REACHED.get((v, config.waves, config.n0, turns), other)[masked]
    rate = (arch.throughput.peak_flops(config.q.value, units=units) or 1e12) * reached
    each = blocks / units
    busy = each / (max(each, 1.0) + _LAST) if draws_tiles(config) else unit_efficiency(blocks, units, 1)
    compute = 2.0 * seen * (q + v) / rate / busy * (1.0 + steps / 8)
    late = 0.0 if has_own_results(config, arch) else _LATE_SECONDS
    between = max(each, 1.0) * (_TILE_SECONDS + late + (0.0 if turns else _ABREAST_SECONDS))
    memory = problem.bytes_moved / (arch.throughput.memory_bytes_per_second or 1e12)
    parts = {"compute": compute, "tiles": between, "memory": memory, "launch": launch}
    return Prediction(max(compute + between, memory) + launch, parts)


def _parts(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, steps: float, launch: float) -> Prediction:
    """Seconds of tiles of many rows over parts of the keys, and of adding these up."""
    arch, (q, v), units = device.arch, config.hdim, units_of(device)
    splits, tiles = choose_splits(problem, config, device), work_items(problem, config, device)
    turns = config.scheduler is Scheduling.PINGPONG
    reached = _REACHED.get((v, config.waves, config.n0, turns), (_OTHER, _OTHER))[0]
    rate = (arch.throughput.peak_flops(config.q.value, units=1) or 1e10) * reached
    block = 2.0 * config.m0 * config.n0 * (q + v) / rate * (1.0 + steps / 8)
    blocks = ceil_div(ceil_div(max(problem.seq_k, 1), config.n0), splits)
    compute = ceil_div(tiles * splits, units) * (blocks * block + _TILE_SECONDS + _ABREAST_SECONDS)
    rows = problem.batch * problem.heads_q * problem.seq_q
    partial, more = (8.0 * splits * rows * v, launch) if splits > 1 else (0.0, 0.0)
    memory_rate = arch.throughput.memory_bytes_per_second or 1e12
    memory = problem.bytes_moved / memory_rate
    added = partial / memory_rate + more
    parts = {"compute": compute, "memory": memory, "added": added, "launch": launch}
    return Prediction(max(compute, memory) + added + launch, parts)


def _gradients(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan: products, and before and after them each row's numbers and sums of dQ in fp32."""
    arch, (q, v), units = device.arch, config.hdim, units_of(device)
    heads = problem.batch * problem.heads_q
    blocks = problem.batch * problem.heads_k * ceil_div(max(problem.seq_k, 1), config.n0)
    every = heads * problem.seq_q * problem.seq_k
    share = min((problem.pairs / every if every else 1.0) + config.n0 / max(2 * problem.seq_k, 1), 1.0)
    seen = heads * padded(max(problem.seq_q, 1), config.m0) * padded(max(problem.seq_k, 1), config.n0) * share
    reached = _GRADIENTS[max(config.hdim)][config.mask is not MaskKind.NONE]
    reached *= _FIXED_ORDER if config.deterministic else 1.0
    rate = (arch.throughput.peak_flops(config.q.value, units=units) or 1e12) * reached
    compute = 2.0 * seen * (3 * q + 2 * v) / rate / unit_efficiency(blocks, units, 1)
    launch = _GRADIENT_LAUNCHES * LAUNCH_SECONDS
    sums = 8.0 * heads * problem.seq_q * q
    memory = (problem.bytes_moved + sums) / (arch.throughput.memory_bytes_per_second or 1e12)
    return Prediction(compute + memory + launch, {"compute": compute, "memory": memory, "launch": launch})
