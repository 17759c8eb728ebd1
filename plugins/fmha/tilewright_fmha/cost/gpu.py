"""Cost of a plan on a GPU: products, exponentials, and bytes through the second-level cache and from memory.

What an arch does not state is assumed once, here: the assumptions shift all candidates alike.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.pipelines import offers_specialised
from tilewright_fmha.footprint.backward_partition import counted_clocks, gradient_clocks, on_mma
from tilewright_fmha.footprint.gpu import resident
from tilewright_fmha.launch.splits import choose_splits, tickets_of
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.units import clock_of, unit_efficiency, units_of
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = ["LAUNCH_SECONDS", "more_steps", "predict_gpu"]

LAUNCH_SECONDS = 4.0e-6
_EXP_PER_CYCLE = {"cuda": 16, "hip": 16}
"""Exponentials that one unit starts in a cycle: CUDA programming guide, throughput of special functions; AMD: a quarter
of its 64 lanes (ISA guides: transcendental functions).
"""
_STEPS = 3.0
"""Vector operations on a score besides its exponential, as parts of one: scale, maximum, sum, conversion."""
_STEP_COST = {"bias": 1.0, "softcap": 2.5, "dropout": 4.0}
_L2_PER_BYTE = 4.0
"""How much faster the second-level cache is than memory where the arch does not say."""
_REACHED = {"v3": 0.6, "qr_async": 0.45, "qr": 0.35, "bwd": 0.3}
"""Part of the peak rate of products that loops reach."""
_MANY_QUERIES = 64
"""So many that products, not bytes, bind split kernels."""
_BESIDE_WS = 0.55
"""Share of it in forward loops on archs whose peak rate only instructions of specialised kernels reach: measured on
an H200,
200 to 270 TFLOP/s where a wave has 16 rows.
"""
_WAVES_OF_UNIT = 8
"""So many take turns where a unit reaches that: one alone mostly waits for its own results (measured)."""
_MORE_ROWS, _OF_BLOCK, _OF_TILE = 1.15, 8, 16
"""CUDA devices, measured: waves of 32 rows read keys and values half as often; what a block of keys costs beside its
columns, and what its copies cost beside a tile's rows.
"""
_DRAWN = {"qr": 0.4, "qr_pagedkv": 0.4, "qr_async": 0.7}
"""Part of the rate of memory that loops draw which ask for little, or nothing, ahead."""


def predict_gpu(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan, and what they are made of."""
    arch = device.arch
    if config.family is Family.APPENDKV:
        return _append(problem, config, arch)
    units, clock = units_of(device), clock_of(arch)
    backward = config.family is Family.DQ_DK_DV
    splits = choose_splits(problem, config, device) if config.family is Family.SPLITKV else 1
    packed = config.pack_gqa
    rows = problem.seq_q * (problem.group if packed else 1)
    heads = problem.batch * (problem.heads_k if packed else problem.heads_q)
    tiles = ceil_div(max(problem.seq_k, 1), config.n0) if backward else ceil_div(max(rows, 1), config.m0)
    blocks = heads * tiles * splits
    busy = unit_efficiency(blocks, units, resident(config, arch))
    every = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    share = min((problem.pairs / every if every else 1.0) + config.n0 / max(2 * problem.seq_k, 1), 1.0)
    pairs = heads * padded(max(rows, 1), config.m0) * padded(max(problem.seq_k, 1), config.n0) * share
    q, v = config.hdim
    products = 3 * q + 2 * v if backward else q + v
    rate = (arch.throughput.peak_flops(_rate_of(config), units=units) or 1e12) * _REACHED.get(config.pipeline, 0.35)
    many = config.family is Family.FWD or (config.family is Family.SPLITKV and problem.seq_q >= _MANY_QUERIES)
    if many and offers_specialised(arch):
        rate *= _BESIDE_WS * min(1.0, max(blocks / units, 1.0) * config.waves / _WAVES_OF_UNIT)
    if arch.kind == "cuda" and config.is_forward:
        rate *= _loop_share(config)
    compute = 2.0 * pairs * products / rate / busy
    steps = 1.0 + _STEPS / 4 + more_steps(problem)
    scores = pairs * steps * (1.5 if backward else 1.0) / (_EXP_PER_CYCLE.get(arch.kind, 16) * clock * units) / busy
    if backward and on_mma(config, arch):
        per_clock = (arch.throughput.peak_flops(_rate_of(config), units=1) or 1e12) / clock
        compute = pairs / (config.m0 * config.n0) * gradient_clocks(config, per_clock) / (clock * units) / busy
        scores *= 0.5
    elif backward and arch.rates:
        per_clock = (arch.throughput.peak_flops(_rate_of(config), units=1) or 1e12) / clock
        clocks = counted_clocks(config, arch.rates, per_clock, resident(config, arch))
        compute = pairs / (config.m0 * config.n0) * clocks / (clock * units) / busy
    memory_rate = (arch.throughput.memory_bytes_per_second or 1e12) * _DRAWN.get(config.pipeline, 1.0)
    l2_rate = arch.throughput.l2_bytes_per_second or memory_rate * _L2_PER_BYTE
    # Every tile of rows reads all keys and values that it sees; few workgroups do not draw the full rate.
    keys = heads * tiles * problem.seq_k * share * (q + v) * config.kv.bytes * (2 if backward else 1)
    if backward and arch.rates:
        keys += pairs / config.n0 * q * 8  # the sums of dq, read and written in fp32
    drawn = min(1.0, blocks / units)
    cached = keys / (l2_rate * drawn)
    partial = 8.0 * splits * rows * heads * v if splits > 1 else 0.0
    memory = (problem.bytes_moved + partial) / (memory_rate * min(1.0, 1.5 * drawn))
    launches = {Family.SPLITKV: 1 if tickets_of(config, device, 2) else 2, Family.DQ_DK_DV: 3}.get(config.family, 1)
    seconds = max(compute + scores, cached, memory) + launches * LAUNCH_SECONDS
    parts = {"compute": compute, "scores": scores, "l2": cached, "memory": memory, "launch": launches * LAUNCH_SECONDS}
    return Prediction(max(seconds, 1e-9), parts)


def more_steps(problem: FmhaProblem) -> float:
    """Vector operations on a score that its features add, as parts of its exponential."""
    features = {
        "bias": problem.bias is not BiasKind.NONE,
        "softcap": problem.softcap > 0,
        "dropout": problem.has_dropout,
    }
    return sum(_STEP_COST[name] for name, asked in features.items() if asked)


def _loop_share(config: FmhaConfig) -> float:
    """How much of a loop's time is its products', in parts of what ``_REACHED`` says."""
    rows = _MORE_ROWS if config.m0 >= 32 * config.wave[0] else 1.0
    return rows * config.n0 / (config.n0 + _OF_BLOCK) * config.m0 / (config.m0 + _OF_TILE) * 1.25


def _rate_of(config: FmhaConfig) -> str:
    """8-bit floats are multiplied as 16 bits."""
    return "fp16" if config.q.bytes == 1 else config.q.value


def _append(problem: FmhaProblem, config: FmhaConfig, arch: ArchSpec) -> Prediction:
    new = problem.batch * problem.heads_k * problem.new_rows * (problem.hdim_q + problem.hdim_v) * config.kv.bytes
    queries = problem.batch * problem.heads_q * problem.seq_q * problem.hdim_q * config.q.bytes
    memory = 2.0 * (new + queries) / (arch.throughput.memory_bytes_per_second or 1e12)
    return Prediction(memory + LAUNCH_SECONDS, {"memory": memory, "launch": LAUNCH_SECONDS})
