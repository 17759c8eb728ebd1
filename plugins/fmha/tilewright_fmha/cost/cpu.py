"""Cost of a plan on a CPU: an analytic estimate."""

from __future__ import annotations

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.defaults import cpu_register_tiles
from tilewright_fmha.footprint.cpu import MOST_ROWS
from tilewright_fmha.launch.splits import choose_splits
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.cpu import BARRIER_SECONDS, CALL_SECONDS, TEAM_SECONDS, bandwidth, clock, read
from tilewright_kit.tiles.cost.units import unit_efficiency
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = ["predict_cpu"]

_EXP_CYCLES = 16.0
"""Cycles of a vector of scores on its way to probabilities: maximum, exponential, sum. Counted from the instructions of
``tilewright/cpu/fmha/softmax.hpp``, at two a cycle; each further step of a score adds some.
"""
_STEP_CYCLES = {"bias": 4.0, "softcap": 24.0, "dropout": 40.0}
_PACK_CYCLES = 2.0
"""Cycles of a vector of keys or values, on top of reading it."""
_PART = 0.85
"""Part of the peak rate that products of whole register tiles reach from L2."""
_BLOCK_SECONDS = 1.5e-7
"""Entering and leaving a block of scores."""
_STAGES = {Family.SPLITKV: 2, Family.DQ_DK_DV: 3}


def predict_cpu(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan, and what they are made of."""
    return (_append if config.family is Family.APPENDKV else _attention)(problem, config, device)


def _visible_share(problem: FmhaProblem) -> float:
    """Pairs that are visible, of all."""
    every = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    return problem.pairs / every if every else 1.0


def _attention(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    arch, team = device.arch, config.team
    backward = config.family is Family.DQ_DK_DV
    lanes = arch.vector_bytes // 4
    mr = config.warp_tile[0]
    rows = max(problem.seq_q * problem.group, 1)
    splits = choose_splits(problem, config, device) if config.family is Family.SPLITKV else 1
    # The forward kernels share out rows so that everybody has some, and each piece packs its own keys.
    heads = problem.batch * problem.heads_k
    most = padded(MOST_ROWS, config.m0)
    wanted = ceil_div(rows * heads * splits, 4 * team)
    piece = min(max(padded(wanted, config.m0), config.m0), most) if not backward else rows
    tiles = ceil_div(rows, piece)
    pieces = heads * tiles * splits
    busy = unit_efficiency(pieces, team)
    share = min(_visible_share(problem) + config.n0 / max(2 * problem.seq_k, 1), 1.0)
    columns = padded(max(problem.seq_k, 1), config.n0 if problem.seq_k > config.n0 else lanes)
    pairs = heads * padded(rows, mr) * columns * share
    q, v = padded(config.hdim[0], lanes), padded(config.hdim[1], lanes)
    products = (3 * q + 2 * v) if backward else q + v
    flops = 2.0 * pairs * products
    compute = flops / (_rate(config, device) * _PART * _preference(config, device)) / team / busy
    blocks = pairs / (max(config.m0, 1) * config.n0) * _BLOCK_SECONDS / team / busy
    cycles = _EXP_CYCLES * (1.5 if backward else 1.0)
    cycles += _STEP_CYCLES["bias"] * (config.bias is not BiasKind.NONE)
    cycles += sum(_STEP_CYCLES[name] for name in ("softcap", "dropout") if getattr(config, name))
    scores = pairs / lanes * cycles / clock(device) / team / busy
    read_keys = heads * tiles * problem.seq_k * share * (problem.hdim_q + problem.hdim_v)
    packing = read_keys / lanes * _PACK_CYCLES / clock(device) / team / busy
    packing += read_keys * config.kv.bytes / bandwidth(device, team) if tiles * piece > problem.group else 0.0
    memory = read(problem.bytes_moved, device, team)
    launches = _STAGES.get(config.family, 1)
    launch = launches * (CALL_SECONDS + (TEAM_SECONDS if team > 1 else 0.0)) + (launches - 1) * BARRIER_SECONDS
    combine = read(2.0 * 4 * splits * rows * heads * v, device, team) if splits > 1 else 0.0
    parts = {
        "compute": compute,
        "blocks": blocks,
        "scores": scores,
        "packing": packing,
        "launch": launch,
        "combine": combine,
    }
    return Prediction(max(sum(parts.values()), memory, 1e-9), {**parts, "memory": memory})


def _append(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    new = problem.batch * problem.heads_k * problem.new_rows * (problem.hdim_q + problem.hdim_v)
    queries = problem.batch * problem.heads_q * problem.seq_q * problem.hdim_q
    nbytes = 2.0 * config.kv.bytes * new + 2.0 * config.q.bytes * queries
    memory = read(nbytes, device, config.team)
    launch = CALL_SECONDS + (TEAM_SECONDS if config.team > 1 else 0.0)
    return Prediction(max(memory + launch, 1e-9), {"memory": memory, "launch": launch})


def _rate(config: FmhaConfig, device: DeviceInfo) -> float:
    """Peak operations per second of one core."""
    per_cycle = device.arch.throughput.flops_per_cycle_per_unit
    dtype = "bf16" if config.warp_tile[2] == 2 else "fp32"
    return float(per_cycle.get(dtype, per_cycle.get("fp32", 16))) * clock(device)


def _preference(config: FmhaConfig, device: DeviceInfo) -> float:
    """Register tiles differ by few per cent, in the order of ``cpu_register_tiles``."""
    tiles = cpu_register_tiles(device.arch)
    place = tiles.index(config.warp_tile[:2]) if config.warp_tile[:2] in tiles else len(tiles)
    return 1.0 / (1.0 + 0.01 * place)
