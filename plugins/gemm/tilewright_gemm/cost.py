"""A deterministic analytic estimate of a plan's device time, good enough to rank kernels.

What an arch does not state (clocks and bandwidths of CPUs differ by machine) is assumed once, here: the assumptions
shift all candidates alike.
"""

from __future__ import annotations

from tilewright_gemm.config import GemmConfig
from tilewright_gemm.gpu_cost import predict_gpu
from tilewright_gemm.hip_cost import predict_hip
from tilewright_gemm.hip_pack import predict_hip_pack
from tilewright_gemm.problem import GemmProblem, PackBProblem, Product
from tilewright_gemm.workspace import SHARED_BYTES, slices
from tilewright_kit.cost import padded
from tilewright_kit.device import DeviceInfo
from tilewright_kit.operation import Prediction
from tilewright_kit.tiles.footprint import lanes

__all__ = ["predict_gemm", "predict_pack_b"]

_CLOCK_HZ = 4.0e9
_CORE_BANDWIDTH = 4.0e10
"""Bytes per second that one core draws from memory, and (below) how much of it each further core adds."""
_BANDWIDTH_SCALING = 0.85
_CACHE_BANDWIDTH = 1.0e11
"""The same from caches, each core for itself."""
_PACK_SECONDS_PER_GROUP = 1.0 / 1.1e10
"""Converting and storing one 32-bit group while packing, on top of reading it."""
_TEAM_SECONDS = 1.5e-6
_BARRIER_SECONDS = 5.0e-7
_CALL_SECONDS = 3.0e-7
_TILE_SECONDS = 2.0e-8
"""Entering and leaving one register tile."""
_STREAM_ROWS = 8
_STREAM_CHUNK = 512
_DECODE_CYCLES = 3.0
_CHUNK_SECONDS = 4.0e-7
"""Of the streaming pipeline: results that one call accumulates, widening a vector, what begins and ends a call."""


def predict_gemm(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """Seconds of all stages, and what they are made of."""
    if device.arch.kind != "cpu":
        predict = predict_gpu if device.arch.kind == "cuda" else predict_hip
        return predict(problem, config, device)
    products = [product for product in problem.products if not product.is_empty]
    return _sum([_cpu(problem, product, config, device) for product in products], config)


def predict_pack_b(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """The time of the products to come, for it is they that a format is chosen for; packing itself costs about the same
    in all formats.
    """
    if device.arch.kind != "cpu":
        return predict_hip_pack(problem, config, device)
    seconds, parts = _blocked(problem.m, problem.n, problem.k, config, device, (4, 4))
    return Prediction(seconds, parts)


def _sum(items: list[tuple[float, dict[str, float]]], config: GemmConfig) -> Prediction:
    total: dict[str, float] = {}
    for _, parts in items:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value
    launch = _CALL_SECONDS + (_TEAM_SECONDS if config.waves > 1 else 0.0)
    total["launch"] = launch * (2 if config.split_k > 1 else 1)
    return Prediction(sum(seconds for seconds, _ in items) + total["launch"], total)


# ---- CPU ----


def _cpu(
    problem: GemmProblem, product: Product, config: GemmConfig, device: DeviceInfo
) -> tuple[float, dict[str, float]]:
    split = slices(product.k, config.split_k, config.tile[2])
    bytes_a, bytes_b, bytes_c = problem.dtype_a.bytes, problem.dtype_b.bytes, problem.dtype_c.bytes
    apart = config.scheduler == "interwave" or config.pipeline == "compv1"
    # Whoever works apart takes whole products where there are enough of them, and rectangles of one otherwise.
    count = product.batch * split
    m, n, k = product.m, product.n, -(-product.k // split)
    team, rounds = config.waves, float(count)
    if apart and team > 1:
        if count * len(problem.products) >= 4 * team:
            team, rounds = 1, count / config.waves
        else:
            m, n = -(-m // config.wave[0]), -(-n // config.wave[1])
            team = 1
    alone = config.replace(wave=(1, 1, 1)) if team == 1 and config.waves > 1 else config
    if config.pipeline == "mem":
        seconds, parts = _streaming(m, n, k, alone, device, (bytes_a, bytes_b))
    elif config.pipeline == "compv1":
        seconds, parts = _in_place(m, n, k, alone, device, (bytes_a, bytes_b))
    else:
        seconds, parts = _blocked(m, n, k, alone, device, (bytes_a, bytes_b))
    parts = {name: value * rounds for name, value in parts.items()}
    bandwidth = _bandwidth(device, config.waves)
    parts["store"] = product.batch * product.m * product.n * bytes_c / bandwidth
    if split > 1:
        parts["reduce"] = product.batch * product.m * product.n * 4 * (split + 1) / bandwidth
    return seconds * rounds + parts["store"] + parts.get("reduce", 0.0), parts


def _blocked(
    m: int, n: int, k: int, config: GemmConfig, device: DeviceInfo, sizes: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    """One product by the driver of ``tilewright/cpu/blocked.hpp``."""
    mr, nr, depth = config.warp_tile
    team = config.waves
    groups = max(-(-k // depth), 1)
    shares_b = config.tile[1] >= config.tile[0]
    shared_r, slab_r = (nr, mr) if shares_b else (mr, nr)
    shared, slab_side = (n, m) if shares_b else (m, n)
    shared_bytes, slab_bytes = (sizes[1], sizes[0]) if shares_b else (sizes[0], sizes[1])
    tile_s, tile_p = (config.tile[1], config.tile[0]) if shares_b else (config.tile[0], config.tile[1])
    length = min(padded(shared, shared_r), tile_s, max(SHARED_BYTES // (4 * groups) // shared_r, 1) * shared_r)
    passes = -(-shared // length)
    slab = padded(-(-slab_side // (4 * team)), slab_r) if team > 1 else padded(slab_side, slab_r)
    slab = max(min(slab, padded(tile_p, slab_r)), slab_r)
    # Slabs are claimed one by one; the last may be short, and goes to whoever is free.
    whole, rest = divmod(slab_side, slab)
    each, left = divmod(whole, team)
    busiest = padded((each + 1) * slab if left else each * slab + rest, slab_r)
    tiles = busiest // slab_r * -(-shared // shared_r)
    rate = _rate(config, device) * _tile_rate(config, device)
    compute = tiles * mr * nr * groups * depth * 2 / rate
    edges = tiles * -(-groups // max(config.tile[2] // depth, 1)) * _TILE_SECONDS
    reads_s = 0.0 if shares_b and config.preshuffle else shared * groups / team
    reads_p = 0.0 if not shares_b and config.preshuffle else busiest * groups * passes
    packing = (reads_s + reads_p) * _PACK_SECONDS_PER_GROUP
    if reads_s:
        packing += _read(shared * k * shared_bytes, device, team)
    if reads_p:
        packing += _read(slab_side * k * slab_bytes, device, team)
    fetch = 0.0
    if config.preshuffle:
        # Packed panels stream in while the products run.
        panels = padded(n, nr) * groups * 4
        fetch = max(0.0, _read(panels, device, team) * (1 if shares_b else passes) - 0.6 * compute)
    barriers = passes * _BARRIER_SECONDS if team > 1 and config.scheduler == "intrawave" else 0.0
    parts = {"compute": compute, "tiles": edges, "packing": packing, "fetch": fetch, "barriers": barriers}
    return sum(parts.values()), parts


def _in_place(
    m: int, n: int, k: int, config: GemmConfig, device: DeviceInfo, sizes: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    mr, nr, depth = config.warp_tile
    groups = max(-(-k // depth), 1)
    tiles = -(-m // mr) * -(-n // nr)
    compute = tiles * mr * nr * groups * depth * 2 / (_rate(config, device) * _tile_rate(config, device))
    in_place_b = config.layout[1] == "r" and sizes[1] == 4
    in_place_a = config.layout[0] == "r" and sizes[0] * depth == 4
    packed = (0 if in_place_b else n * groups) + (m % mr if in_place_a else m) * groups
    strides = 0.15 if in_place_b and n > 4 * nr else 0.0  # rows of B far apart miss the nearer caches
    parts = {
        "compute": compute * (1.0 + strides),
        "tiles": tiles * _TILE_SECONDS,
        "packing": packed * _PACK_SECONDS_PER_GROUP + (m * k * sizes[0] + n * k * sizes[1]) / _CACHE_BANDWIDTH,
    }
    return sum(parts.values()), parts


def _streaming(
    m: int, n: int, k: int, config: GemmConfig, device: DeviceInfo, sizes: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    """Few rows (or columns) against a big operand that is read once for every eight of them."""
    small, big = min(m, n), max(m, n)
    big_bytes = sizes[1] if n >= m else sizes[0]
    passes = -(-small // _STREAM_ROWS)
    memory = _read(big * k * big_bytes, device, config.waves) * passes
    rows = small if small % _STREAM_ROWS == 0 else padded(small, 4) if small > 1 else 1
    along_k = (config.layout[1] == "c") if n >= m else (config.layout[0] == "r")
    depth = config.warp_tile[2]
    rate = _rate(config, device) * (0.5 if along_k else 0.55) * config.waves
    # Values that do not lie as groups of 32 bits are widened or interleaved first.
    ready = big_bytes * depth == 4 and (along_k or depth == 1)
    vectors = big * -(-k // depth) * passes / lanes(device.arch)
    cycles = 0.0 if ready else 1.0 if big_bytes == 2 and depth == 1 else _DECODE_CYCLES
    decode = vectors * cycles / (_clock(device) * config.waves)
    compute = 2 * rows * big * k / rate + decode
    chunks = max(-(-big // _STREAM_CHUNK), config.waves)
    prepare = passes * (padded(k, 16) * _STREAM_ROWS * 0.3 / _clock(device) + chunks * _CHUNK_SECONDS / config.waves)
    # The loads of a dot product wait for memory, and little else goes on meanwhile.
    seconds = max(memory, compute) + 0.5 * min(memory, compute) + prepare
    return seconds, {"compute": compute, "memory": memory, "packing": prepare}


def _rate(config: GemmConfig, device: DeviceInfo) -> float:
    """Peak operations per second of one core for the instruction of the warp tile."""
    arch = device.arch
    per_cycle = arch.throughput.flops_per_cycle_per_unit
    dtype = config.a
    if config.a != "int8" and config.warp_tile[2] == 1:
        dtype = "fp32"  # widened while packing
    elif config.a == "int8" and config.warp_tile[2] == 1:
        return float(min(per_cycle.get("int8", 16), per_cycle.get("fp32", 16))) * _clock(device)
    return float(per_cycle.get(dtype, per_cycle.get("fp32", 16))) * _clock(device)


def _tile_rate(config: GemmConfig, device: DeviceInfo) -> float:
    """Part of the peak that a register tile reaches: enough accumulators to hide latency, more products than loads."""
    rows, columns = config.warp_tile[0], -(-config.warp_tile[1] // lanes(device.arch))
    products = rows * columns
    latency = min(1.0, products / 8.0)
    loads = min(1.0, products / (rows * 0.9 + columns) / 1.3)
    # A panel of B comes from L2 once for every tile: the fewer rows, the less time there is to hide it.
    return 0.97 * latency * loads / (1.0 + 2.0 / max(rows, 4) ** 2)


def _clock(device: DeviceInfo) -> float:
    return device.arch.throughput.clock_mhz * 1e6 or _CLOCK_HZ


def _read(nbytes: float, device: DeviceInfo, team: int) -> float:
    """Seconds until a team has read that much once more: from the last cache as far as it holds it."""
    last = max(device.arch.caches.l3_bytes, device.arch.caches.l2_bytes, 1)
    missing = min(max(nbytes / last - 1.0, 0.0), 1.0)
    return nbytes * (missing / _bandwidth(device, team) + (1.0 - missing) / (_CACHE_BANDWIDTH * team))


def _bandwidth(device: DeviceInfo, team: int) -> float:
    one = device.arch.throughput.memory_bytes_per_second or _CORE_BANDWIDTH
    return one * (1.0 + _BANDWIDTH_SCALING * (min(team, 8) - 1))
