"""The time of blocked products on a CPU.

Figures that an arch does not state (clocks and bandwidths of CPUs differ by machine) are assumed here: the assumptions
shift all candidates alike.
"""

from __future__ import annotations

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.footprint.cpu import SHARED_BYTES
from tilewright_kit.tiles.footprint.workgroup import lanes
from tilewright_kit.tiles.tiled import Tiled
from tilewright_kit.types.arithmetic import padded

__all__ = [
    "BARRIER_SECONDS",
    "CACHE_BANDWIDTH",
    "CALL_SECONDS",
    "PACK_SECONDS_PER_GROUP",
    "TEAM_SECONDS",
    "TILE_SECONDS",
    "bandwidth",
    "blocked",
    "clock",
    "rate",
    "read",
    "tile_rate",
]

_CLOCK_HZ = 4.0e9
_CORE_BANDWIDTH = 4.0e10
"""Bytes per second that one core draws from memory, and (below) how much of it each further core adds."""
_BANDWIDTH_SCALING = 0.85
CACHE_BANDWIDTH = 1.0e11
"""The same from caches, each core for itself."""
PACK_SECONDS_PER_GROUP = 1.0 / 1.1e10
"""Converting and storing one 32-bit group while packing, on top of reading it."""
TEAM_SECONDS = 1.5e-6
BARRIER_SECONDS = 5.0e-7
CALL_SECONDS = 3.0e-7
TILE_SECONDS = 2.0e-8
"""Entering and leaving one register tile."""


def blocked(
    m: int, n: int, k: int, config: Tiled, device: DeviceInfo, sizes: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    """One product by the driver of ``tilewright/cpu/blocks/blocked.hpp``."""
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
    speed = rate(config, device) * tile_rate(config, device)
    compute = tiles * mr * nr * groups * depth * 2 / speed
    edges = tiles * -(-groups // max(config.tile[2] // depth, 1)) * TILE_SECONDS
    reads_s = 0.0 if shares_b and config.preshuffle else shared * groups / team
    reads_p = 0.0 if not shares_b and config.preshuffle else busiest * groups * passes
    packing = (reads_s + reads_p) * PACK_SECONDS_PER_GROUP
    if reads_s:
        packing += read(shared * k * shared_bytes, device, team)
    if reads_p:
        packing += read(slab_side * k * slab_bytes, device, team)
    fetch = 0.0
    if config.preshuffle:
        # Packed panels stream in while the products run.
        panels = padded(n, nr) * groups * 4
        fetch = max(0.0, read(panels, device, team) * (1 if shares_b else passes) - 0.6 * compute)
    barriers = passes * BARRIER_SECONDS if team > 1 and config.scheduler == "intrawave" else 0.0
    parts = {"compute": compute, "tiles": edges, "packing": packing, "fetch": fetch, "barriers": barriers}
    return sum(parts.values()), parts


def rate(config: Tiled, device: DeviceInfo) -> float:
    """Peak operations per second of one core for the instruction of the warp tile."""
    arch = device.arch
    per_cycle = arch.throughput.flops_per_cycle_per_unit
    dtype = config.a
    if config.a != "int8" and config.warp_tile[2] == 1:
        dtype = "fp32"  # widened while packing
    elif config.a == "int8" and config.warp_tile[2] == 1:
        return float(min(per_cycle.get("int8", 16), per_cycle.get("fp32", 16))) * clock(device)
    return float(per_cycle.get(dtype, per_cycle.get("fp32", 16))) * clock(device)


def tile_rate(config: Tiled, device: DeviceInfo) -> float:
    """Part of the peak that a register tile reaches: enough accumulators to hide latency, more products than loads."""
    rows, columns = config.warp_tile[0], -(-config.warp_tile[1] // lanes(device.arch))
    products = rows * columns
    latency = min(1.0, products / 8.0)
    loads = min(1.0, products / (rows * 0.9 + columns) / 1.3)
    # A panel of B comes from L2 once for every tile: the fewer rows, the less time there is to hide it.
    return 0.97 * latency * loads / (1.0 + 2.0 / max(rows, 4) ** 2)


def clock(device: DeviceInfo) -> float:
    return device.arch.throughput.clock_mhz * 1e6 or _CLOCK_HZ


def read(nbytes: float, device: DeviceInfo, team: int) -> float:
    """Seconds until a team has read that much once more: from the last cache as far as it holds it."""
    last = max(device.arch.caches.l3_bytes, device.arch.caches.l2_bytes, 1)
    missing = min(max(nbytes / last - 1.0, 0.0), 1.0)
    return nbytes * (missing / bandwidth(device, team) + (1.0 - missing) / (CACHE_BANDWIDTH * team))


def bandwidth(device: DeviceInfo, team: int) -> float:
    one = device.arch.throughput.memory_bytes_per_second or _CORE_BANDWIDTH
    return one * (1.0 + _BANDWIDTH_SCALING * (min(team, 8) - 1))
