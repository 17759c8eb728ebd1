"""Selection of many kernels by options."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.kernel_sets.sweeps import SWEEPS
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_kit.kernel_sets.declare import Declaration, KernelSet
from tilewright_kit.kernel_sets.options import as_list, named, triple_axes
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["FIELD_NAMES", "select_set"]

FIELD_NAMES = {"elementwise_ops": "binary"}
"""Fields as Composable Kernel's generator names them."""

_TRAITS = ("pipeline", "epilogue", "scheduler", "pad_m", "pad_n", "pad_k", "persistent")
_SECTIONS = ("tile_config", "trait_config", "multi_d_config")


def select_set(
    arch: ArchSpec,
    datatypes: Sequence[str] = ("fp16",),
    layouts: Sequence[str] = ("rcr",),
    variants: Sequence[str] = ("standard",),
    preselected: str = "",
    tile_config: Mapping[str, Any] | None = None,
) -> list[GemmConfig]:
    """The valid kernels of a preselected set, of a tile configuration, or of the default sweep of each variant.

    ``tile_config`` has lists or single values under ``tile_m``, ``warp_m`` (waves), ``warp_tile_m``, ..., ``pipeline``,
    ``epilogue``, ``scheduler``, ``pad_m``, ``persistent``, ``elementwise_ops`` and ``num_d_tensors``, flat or in the
    sections ``tile_config``, ``trait_config`` and ``multi_d_config``. On CPUs, which the sweeps do not cover, the
    default set stands in for them. A preselected set brings its own types and layouts. Raises ``NotFoundError`` for an
    unknown set or variant and ``InvalidArgumentError`` for a malformed configuration.
    """
    if preselected:
        return list(named(KERNEL_SETS, preselected, "kernel set").expand(arch, RULES))
    found: dict[GemmConfig, None] = {}
    for variant in variants:
        base = named(SWEEPS, variant, "variant")
        if tile_config:
            chosen: Iterable[GemmConfig] = _configured(base, tile_config, padded=arch.kind == "cuda")
        elif arch.kind == "cpu":
            chosen = (config for config in KERNEL_SETS["default"].expand(arch, RULES) if config.variant == variant)
        else:
            chosen = base.expand(arch, RULES)
        for config in chosen:
            for dtype, layout in itertools.product(datatypes, layouts):
                typed = config.replace(
                    dtype_a=GemmConfig.coerce("dtype_a", dtype), layout=GemmConfig.coerce("layout", layout)
                )
                if typed not in found and RULES.allows(typed, arch):
                    found[typed] = None
    return list(found)


def _configured(base: KernelSet[GemmConfig], given: Mapping[str, Any], *, padded: bool) -> Iterable[GemmConfig]:
    """Every combination of a tile configuration, on the signature of the variant ``base``. ``padded``: unless it says
    otherwise."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        flat.update(value if key in _SECTIONS and isinstance(value, Mapping) else {key: value})
    axes: dict[str, list[Any]] = {"pad_m": [padded], "pad_n": [padded], "pad_k": [padded], "persistent": [False]}
    axes |= dict(triple_axes(flat, lambda field: getattr(GemmConfig(), field)))
    for field in _TRAITS:
        if field in flat:
            axes[field] = as_list(flat.pop(field))
    for key, field in (*FIELD_NAMES.items(), ("num_d_tensors", "num_d_tensors")):
        if key in flat:
            axes[field] = as_list(flat.pop(key))
    if flat:
        raise InvalidArgumentError(
            f"a tile configuration has no key {min(flat)!r}",
            field=f"tile_config.{min(flat)}",
            value=flat[min(flat)],
            rule="tile_config",
            fix="use tile_m, warp_m, warp_tile_m (and n, k), pipeline, epilogue, scheduler, pad_m, persistent, ...",
        )
    marks = _marks(base.declarations[0])
    for values in itertools.product(*axes.values()):
        yield GemmConfig.from_dict(marks | dict(zip(axes, values, strict=True)))


def _marks(declaration: Declaration[GemmConfig]) -> dict[str, Any]:
    """Fields that make a kernel one of the variant: those of the sweep that have a single value and are no trait."""
    fields = {name: values for name, values in declaration.fields.items() if isinstance(values, tuple)}
    return {
        name: getattr(values[0], "value", values[0])
        for name, values in fields.items()
        if name in ("preshuffle", "batched", "grouped", "reduction", "binary", "num_d_tensors")
    }
