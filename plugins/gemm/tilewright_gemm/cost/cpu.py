"""A deterministic analytic estimate of a plan's device time, good enough to rank kernels.

Figures that an arch does not state (clocks and bandwidths of CPUs differ by machine) are assumed here: the assumptions
shift all candidates alike.
"""

from __future__ import annotations

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import GemmProblem, Product
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.cpu import (
    CACHE_BANDWIDTH,
    CALL_SECONDS,
    PACK_SECONDS_PER_GROUP,
    TEAM_SECONDS,
    TILE_SECONDS,
    bandwidth,
    blocked,
    clock,
    rate,
    read,
    tile_rate,
)
from tilewright_kit.tiles.footprint.cpu import slices
from tilewright_kit.tiles.footprint.workgroup import lanes
from tilewright_kit.types.arithmetic import padded

__all__ = ["predict_cpu"]

_STREAM_ROWS = 8
_STREAM_CHUNK = 512
_DECODE_CYCLES = 3.0
_CHUNK_SECONDS = 4.0e-7
"""Streaming pipeline: results that a call accumulates, cycles to widen a vector, seconds to begin and end a call."""
_LINE_BYTES = 64
_LINE_SECONDS = 1.5e-8
_LINES_OF_NEAR = 32
"""A B that is read in place by strips of columns: seconds for a line that misses caches and address translation, which
all do that lie in that many times the second-level cache.
"""


def predict_cpu(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """Seconds of all stages, and their parts."""
    products = [product for product in problem.products if not product.is_empty]
    return _sum([_cpu(problem, product, config, device) for product in products], config)


def _sum(items: list[tuple[float, dict[str, float]]], config: GemmConfig) -> Prediction:
    total: dict[str, float] = {}
    for _, parts in items:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value
    launch = CALL_SECONDS + (TEAM_SECONDS if config.waves > 1 else 0.0)
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
        seconds, parts = blocked(m, n, k, alone, device, (bytes_a, bytes_b))
    parts = {name: value * rounds for name, value in parts.items()}
    drawn = bandwidth(device, config.waves)
    parts["store"] = product.batch * product.m * product.n * bytes_c / drawn
    if split > 1:
        parts["reduce"] = product.batch * product.m * product.n * 4 * (split + 1) / drawn
    return seconds * rounds + parts["store"] + parts.get("reduce", 0.0), parts


def _in_place(
    m: int, n: int, k: int, config: GemmConfig, device: DeviceInfo, sizes: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    mr, nr, depth = config.warp_tile
    groups = max(-(-k // depth), 1)
    tiles = -(-m // mr) * -(-n // nr)
    compute = tiles * mr * nr * groups * depth * 2 / (rate(config, device) * tile_rate(config, device))
    in_place_b = config.layout[1] == "r" and sizes[1] == 4
    in_place_a = config.layout[0] == "r" and sizes[0] * depth == 4
    packed = (0 if in_place_b else n * groups) + (m % mr if in_place_a else m) * groups
    strides = 0.06 if in_place_b and n > 4 * nr else 0.0  # rows of B far apart miss the nearest cache
    lines = n * k * sizes[1] / _LINE_BYTES if in_place_b and n > nr else 0.0
    missing = min(n * k * sizes[1] / (_LINES_OF_NEAR * max(device.arch.caches.l2_bytes, 1)), 1.0)
    parts = {
        "compute": compute * (1.0 + strides),
        "fetch": lines * missing * _LINE_SECONDS,
        "tiles": tiles * TILE_SECONDS,
        "packing": packed * PACK_SECONDS_PER_GROUP + (m * k * sizes[0] + n * k * sizes[1]) / CACHE_BANDWIDTH,
    }
    return sum(parts.values()), parts


def _streaming(
    m: int, n: int, k: int, config: GemmConfig, device: DeviceInfo, sizes: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    """Few rows (or columns) against a big operand that is read once for every eight of them."""
    small, big = min(m, n), max(m, n)
    big_bytes = sizes[1] if n >= m else sizes[0]
    passes = -(-small // _STREAM_ROWS)
    memory = read(big * k * big_bytes, device, config.waves) * passes
    rows = small if small % _STREAM_ROWS == 0 else padded(small, 4) if small > 1 else 1
    along_k = (config.layout[1] == "c") if n >= m else (config.layout[0] == "r")
    depth = config.warp_tile[2]
    speed = rate(config, device) * (0.7 if along_k else 0.65) * config.waves
    # Values that do not lie as groups of 32 bits are widened or interleaved first.
    ready = big_bytes * depth == 4 and (along_k or depth == 1)
    vectors = big * -(-k // depth) * passes / lanes(device.arch)
    cycles = 0.0 if ready else 1.0 if big_bytes == 2 and depth == 1 else _DECODE_CYCLES
    decode = vectors * cycles / (clock(device) * config.waves)
    compute = 2 * rows * big * k / speed + decode
    chunks = max(-(-big // _STREAM_CHUNK), config.waves)
    prepare = passes * (padded(k, 16) * _STREAM_ROWS * 0.3 / clock(device) + chunks * _CHUNK_SECONDS / config.waves)
    # The loads of a dot product wait for memory, and little else goes on meanwhile.
    seconds = max(memory, compute) + 0.5 * min(memory, compute) + prepare
    return seconds, {"compute": compute, "memory": memory, "packing": prepare}
