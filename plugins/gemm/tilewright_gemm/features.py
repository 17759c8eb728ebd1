"""Inputs of a learned model: the seeds' 72 GEMM features under their names, from problem, kernel and arch.

Two encodings of the seeds clashed and are settled here: every pipeline word has one code in all languages (``compv6``
was 5 in one place and 6 in another, ``compv5`` 2), and the LDS ratio divides by the arch's own budget for the pipeline
instead of a constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import GemmProblem, PackBProblem
from tilewright_gemm.vocabulary import LAYOUTS
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.footprint.workgroup import size_of, staging_bytes, staging_limit

__all__ = ["CATEGORICAL", "EPILOGUES", "NAMES", "PIPELINES", "SCHEDULERS", "gemm_features", "pack_b_features"]

LAYOUT_CODES = {layout: code for code, layout in enumerate(LAYOUTS)}
PIPELINES = {
    "compv3": 0, "compv4": 1, "compv5": 2, "mem": 3, "preshufflev2": 4, "basic_v1": 5, "compv6": 6,
    "compv1": 7, "compv2": 8, "preshufflev1": 9, "wavelet": 10, "comp_async": 11, "basic_async_v1": 12, "ws": 13,
}  # fmt: skip
"""Codes 0 to 6 are the seeds'. New words are appended, never renumbered: trained models hold these numbers."""
SCHEDULERS = {"intrawave": 0, "interwave": 1, "auto": 2, "default": 3, "cooperative": 4, "pingpong": 5}
EPILOGUES = {"default": 0, "cshuffle": 1, "none": 2, "bias": 3, "activation": 4, "bias_activation": 5}
CATEGORICAL = ("layout", "pipeline", "scheduler", "epilogue")
_UNKNOWN = -1


def pack_b_features(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> dict[str, float]:
    """What packing depends on; ``m`` is that of the products to come."""
    return {
        "m": float(problem.m),
        "n": float(problem.n),
        "k": float(problem.k),
        "nr": float(config.warp_tile[1]),
        "vk": float(config.warp_tile[2]),
        "units": float(device.units),
    }


def gemm_features(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> dict[str, float]:
    """All features, in the order of ``NAMES``. A batched or grouped problem is described by its largest product."""
    m, n, k = problem.m, problem.n, problem.k
    found: dict[str, float] = {}
    found.update(_problem(problem, config, m, n, k))
    found.update(_kernel(config, device))
    found.update(_interaction(config, device, (m, n, k)))
    found.update(_padding(config, (m, n, k)))
    found.update(_hardware(device))
    return {name: float(value) for name, value in found.items()}


def _problem(problem: GemmProblem, config: GemmConfig, m: int, n: int, k: int) -> Mapping[str, float]:
    size = problem.dtype_a.bytes
    traffic = (m * k + k * n + m * n) * size
    return {
        "M": m,
        "N": n,
        "K": k,
        "split_k": config.split_k,
        "log2_M": _log2(m),
        "log2_N": _log2(n),
        "log2_K": _log2(k),
        "log2_MNK": _log2(m * n * k),
        "arithmetic_intensity": 2 * m * n * k / max(traffic, 1),
        "aspect_ratio_mn": m / max(n, 1),
        "aspect_ratio_mk": m / max(k, 1),
        "aspect_ratio_nk": n / max(k, 1),
        "layout": LAYOUT_CODES.get(problem.layout, _UNKNOWN),
    }


def _kernel(config: GemmConfig, device: DeviceInfo) -> Mapping[str, float]:
    staged = staging_bytes(config, device.arch)
    found: dict[str, float] = {}
    for letter, tile in zip("mnk", config.tile, strict=True):
        found[f"tile_{letter}"] = tile
    for letter, wave in zip("mnk", config.wave, strict=True):
        found[f"warp_{letter}"] = wave  # the seeds' name for waves per block
    for letter, warp in zip("mnk", config.warp_tile, strict=True):
        found[f"warp_tile_{letter}"] = warp
    return found | {
        "pipeline": PIPELINES.get(config.pipeline, _UNKNOWN),
        "scheduler": SCHEDULERS.get(config.scheduler, _UNKNOWN),
        "epilogue": EPILOGUES.get(config.epilogue.value, _UNKNOWN),
        "pad_m": config.pad_m,
        "pad_n": config.pad_n,
        "pad_k": config.pad_k,
        "persistent": config.persistent,
        "num_warps": config.waves,
        "tile_volume": math.prod(config.tile),
        "tile_mn": config.tile[0] * config.tile[1],
        "lds_usage_estimate": staged if device.arch.kind == "cpu" else _gpu_lds(config),
        "lds_usage_ratio": staged / max(staging_limit(config, device.arch), 1),
    }


def _gpu_lds(config: GemmConfig) -> int:
    return config.tile[0] * config.tile[2] * size_of(config.a) + config.tile[1] * config.tile[2] * size_of(config.b)


def _interaction(config: GemmConfig, device: DeviceInfo, sizes: tuple[int, int, int]) -> Mapping[str, float]:
    pairs = list(zip("mnk", sizes, config.tile, strict=True))
    found: dict[str, float] = {f"num_tiles_{letter}": -(-size // tile) for letter, size, tile in pairs}
    tiles = found["num_tiles_m"] * found["num_tiles_n"]
    found["total_output_tiles"] = tiles
    efficiencies = {f"tile_eff_{letter}": (size % tile) / tile if size % tile else 1.0 for letter, size, tile in pairs}
    found.update(efficiencies)
    found["overall_tile_efficiency"] = math.prod(efficiencies.values())
    found["cu_utilization"] = tiles / max(_units(device), 1)
    found.update({f"ratio_{letter.upper()}_to_tile_{letter}": size / tile for letter, size, tile in pairs})
    found.update({f"problem_smaller_than_tile_{letter}": size < tile for letter, size, tile in pairs})
    found["any_dim_too_small"] = any(size < tile for _, size, tile in pairs)
    return found


def _padding(config: GemmConfig, sizes: tuple[int, int, int]) -> Mapping[str, float]:
    needs = {letter: size % tile != 0 for letter, size, tile in zip("mnk", sizes, config.tile, strict=True)}
    has = dict(zip("mnk", (config.pad_m, config.pad_n, config.pad_k), strict=True))
    found: dict[str, float] = {f"needs_padding_{letter}": needs[letter] for letter in "mnk"}
    found.update({f"has_padding_when_needed_{letter}": needs[letter] and has[letter] for letter in "mnk"})
    found.update({f"missing_required_padding_{letter}": needs[letter] and not has[letter] for letter in "mnk"})
    found["missing_any_required_padding"] = any(needs[letter] and not has[letter] for letter in "mnk")
    return found


def _hardware(device: DeviceInfo) -> Mapping[str, float]:
    """Figures of the arch; what it does not state is zero or follows from its workgroup limit."""
    arch, attributes = device.arch, device.attributes
    simds = float(attributes.get("simds_per_unit", 1 if arch.kind == "cpu" else 4))
    return {
        "hw_num_cus": _units(device),
        "hw_simds_per_cu": simds,
        "hw_total_simds": simds * _units(device),
        "hw_shader_engines": float(attributes.get("shader_engines", 0)),
        "hw_max_clock_mhz": arch.throughput.clock_mhz,
        "hw_max_waves_per_cu": float(
            attributes.get("max_waves_per_unit", arch.max_threads_per_workgroup // arch.wave_size)
        ),
        "hw_wavefront_size": arch.wave_size,
        "hw_lds_capacity": arch.lds_bytes,
        "hw_l1_cache_kb": arch.caches.l1_bytes / 1024,
        "hw_l2_cache_kb": arch.caches.l2_bytes / 1024,
        "hw_l3_cache_kb": arch.caches.l3_bytes / 1024,
        "hw_num_xcd": float(attributes.get("num_xcd", 1)),
    }


def _units(device: DeviceInfo) -> int:
    return device.units or device.arch.throughput.units


def _log2(value: int) -> float:
    return math.log2(max(value, 1))


NAMES = (
    "M", "N", "K", "split_k", "log2_M", "log2_N", "log2_K", "log2_MNK", "arithmetic_intensity",
    "aspect_ratio_mn", "aspect_ratio_mk", "aspect_ratio_nk", "layout",
    "tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "warp_k", "warp_tile_m", "warp_tile_n", "warp_tile_k",
    "pipeline", "scheduler", "epilogue", "pad_m", "pad_n", "pad_k", "persistent", "num_warps", "tile_volume", "tile_mn",
    "lds_usage_estimate", "lds_usage_ratio",
    "num_tiles_m", "num_tiles_n", "num_tiles_k", "total_output_tiles", "tile_eff_m", "tile_eff_n", "tile_eff_k",
    "overall_tile_efficiency", "cu_utilization",
    "ratio_M_to_tile_m", "ratio_N_to_tile_n", "ratio_K_to_tile_k",
    "problem_smaller_than_tile_m", "problem_smaller_than_tile_n", "problem_smaller_than_tile_k", "any_dim_too_small",
    "needs_padding_m", "needs_padding_n", "needs_padding_k",
    "has_padding_when_needed_m", "has_padding_when_needed_n", "has_padding_when_needed_k",
    "missing_required_padding_m", "missing_required_padding_n", "missing_required_padding_k",
    "missing_any_required_padding",
    "hw_num_cus", "hw_simds_per_cu", "hw_total_simds", "hw_shader_engines", "hw_max_clock_mhz", "hw_max_waves_per_cu",
    "hw_wavefront_size", "hw_lds_capacity", "hw_l1_cache_kb", "hw_l2_cache_kb", "hw_l3_cache_kb", "hw_num_xcd",
)  # fmt: skip
