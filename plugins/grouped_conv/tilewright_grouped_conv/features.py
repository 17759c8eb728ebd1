"""Inputs of a learned model, from problem, kernel and arch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright_grouped_conv.applicability.tensors import needed_transforms
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.contract.device import DeviceInfo

__all__ = ["conv_features"]

_DIRECTIONS = {direction: code for code, direction in enumerate(Direction)}
_KINDS = {kind: code for code, kind in enumerate(Kind)}
_PIPELINES = (
    "compv3", "compv4", "compv5", "mem", "basic_v1", "compv6", "compv1", "compv2", "comp_async", "direct", "bulk"
)  # fmt: skip
"""Codes are places in this list: new words are appended, never moved."""


def conv_features(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> dict[str, float]:
    """All features, always under the same names and in the same order."""
    geometry = problem.geometry
    found: dict[str, float] = {"direction": _DIRECTIONS[problem.direction], "ndim": geometry.ndim}
    found |= {"N": geometry.n, "C": geometry.c, "K": geometry.k, "G": geometry.groups}
    for name, sizes in (
        ("in", geometry.input),
        ("filter", geometry.filter),
        ("out", geometry.output),
        ("stride", geometry.stride),
        ("dilation", geometry.dilation),
        ("pad", geometry.pad_begin),
    ):
        found |= {f"{name}_{axis}": size for axis, size in zip("dhw", sizes, strict=True)}
    found |= {f"log2_{letter}": math.log2(max(getattr(problem, letter), 1)) for letter in "mnk"}
    found |= {
        "log2_batch": math.log2(max(problem.batch, 1)),
        "log2_flops": math.log2(max(problem.flops, 1)),
        "intensity": problem.flops / max(problem.bytes_moved, 1),
        "is_depthwise": geometry.is_depthwise,
        "is_pointwise": geometry.is_pointwise,
        "bytes_in": problem.dtype_in.bytes,
        "bytes_out": problem.dtype_out.bytes,
    }
    found |= _kernel(config)
    phase = problem.largest
    for letter, size, tile in zip("mnk", (phase.m, phase.n, phase.k), config.tile, strict=True):
        tiles = -(-size // max(tile, 1))
        found |= {f"tiles_{letter}": tiles, f"tile_eff_{letter}": size / max(tiles * tile, 1)}
    found |= {
        "copied_bytes": sum(copy.nbytes for copy in needed_transforms(problem, config, device)),
        "units": device.units or device.arch.throughput.units,
        "clock_mhz": device.arch.throughput.clock_mhz,
        "lds_bytes": device.arch.lds_bytes,
        "l2_bytes": device.arch.caches.l2_bytes,
        "l3_bytes": device.arch.caches.l3_bytes,
    }
    return {name: float(value) for name, value in found.items()}


def _kernel(config: ConvConfig) -> Mapping[str, float]:
    found: dict[str, float] = {
        "kind": _KINDS[config.kind],
        "pipeline": _PIPELINES.index(config.pipeline) if config.pipeline in _PIPELINES else -1,
        "channels_first": config.channels_first,
        "mapped_rows": config.mapped_rows,
        "split_k": config.split_k,
        "two_stage": config.two_stage,
        "groups_merged": config.num_groups_to_merge,
        "channel_tile": config.channel_tile,
        "pixel_tile": math.prod(config.pixel_tile),
    }
    for what in ("tile", "wave", "warp_tile"):
        found |= {f"{what}_{letter}": size for letter, size in zip("mnk", getattr(config, what), strict=True)}
    return found | {f"vector_{letter}": size for letter, size in zip("abc", config.vector_sizes, strict=True)}
