"""Selection of many kernels by options: a rule set, or lists of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.kernel_sets.defaults import default_config, direction_of
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS, RULE_SETS
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, same_order
from tilewright_kit.kernel_sets.options import TRIPLES, as_list, named, triple_axes
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Switch

__all__ = ["GENERATE_OPTIONS", "select_set"]

_VECTORS = ("vector_a", "vector_b", "vector_c")
_FLAGS = ("pad_m", "pad_n", "pad_k", "split_image", "two_stage", "explicit_gemm", "streamk_persistent")
_WORDS = ("pipeline", "scheduler", "epilogue", "layout", "specialization")
_COUNTS = ("num_wave_groups", "num_groups_to_merge", "split_k")
_SHAPES = tuple(f"{group}_{letter}" for group in TRIPLES for letter in "mnk")

GENERATE_OPTIONS = (
    "rule_set", "variant", "ndim", "datatype", *_SHAPES, *_WORDS, *_VECTORS, *_FLAGS, *_COUNTS, "double_smem_buffer",
    "streamk_enabled", "streamk_reduction_strategy",
)  # fmt: skip
"""Names of what ``select_set`` takes, beside the arch."""


def select_set(
    arch: ArchSpec,
    direction: Direction = Direction.FORWARD,
    *,
    rule_set: str = "",
    variant: str = "",
    ndim: int | Sequence[int] = (),
    datatype: str | Sequence[str] = (),
    **options: Any,
) -> list[ConvConfig]:
    """The valid kernels of a rule set, each with the types and dimensions that are asked for (none: its own), and of
    them those that other options allow; without a rule set, the one kernel that other options describe, or every valid
    one where options are lists.

    What a description leaves out is the arch's default kernel's. An option that is None counts as not given; flags are
    true or false, not texts. A rule set without kernels for the arch gives way to ``default``. Raises ``NotFoundError``
    for an unknown rule set, ``InvalidArgumentError`` for an unknown variant and an unknown or malformed option, and
    ``ConfigInvalidError`` if a single described kernel is not valid.
    """
    if variant:
        direction = direction_of(variant)
    dims = [ndim] if isinstance(ndim, int) else list(ndim)
    types = [datatype] if isinstance(datatype, str) else list(datatype)
    given = {name: value for name, value in options.items() if value is not None}
    axes = dict(_axes(direction, given))
    if axes and not rule_set:
        return _described(arch, direction, axes, dims or [2], types or ["fp16"])
    name = (rule_set or "default").replace("-", "_")
    sets = KERNEL_SETS[direction]
    chosen = named(sets, name, "rule set", "rule_set", RULE_SETS)
    declared = chosen.expand(arch, RULES) or sets["default"].expand(arch, RULES)
    found: dict[ConvConfig, None] = {}
    for config, dtype, count in itertools.product(declared, types or [""], dims or [0]):
        changes: dict[str, Any] = {}
        if dtype:
            changes["dtype_in"] = config.coerce("dtype_in", dtype)
        if count:
            changes |= {"ndim": count, "layout": same_order(config.layout, count if 1 <= count <= 3 else 2)}
        typed = config.replace(**changes)
        if typed not in found and _allowed_by(typed, axes) and RULES.allows(typed, arch):
            found[typed] = None
    return list(found)


def _allowed_by(config: ConvConfig, axes: Mapping[str, list[Any]]) -> bool:
    """True if every option has the kernel's value among its own; None in a triple allows all."""
    for field, values in axes.items():
        have = getattr(config, field)
        if isinstance(have, tuple):
            fits = any(all(want in (None, size) for want, size in zip(item, have, strict=True)) for item in values)
        else:
            fits = have in [config.coerce(field, value) for value in values]
        if not fits:
            return False
    return True


def _described(
    arch: ArchSpec, direction: Direction, axes: Mapping[str, list[Any]], dims: Sequence[int], types: Sequence[str]
) -> list[ConvConfig]:
    found: dict[ConvConfig, None] = {}
    combinations = list(itertools.product(dims, types, *axes.values()))
    for count, dtype, *values in combinations:
        base = default_config(direction.value, count, arch, dtype)
        fields = dict(zip(axes, values, strict=True))
        for name in ("tile", "wave", "warp_tile", "vector_sizes"):
            if name in fields:
                sizes = zip(fields[name], getattr(base, name), strict=True)
                fields[name] = [own if size is None else size for size, own in sizes]
        if "layout" in fields:
            fields["layout"] = same_order(str(fields["layout"]), count)
        config = base.replace(**{name: base.coerce(name, value) for name, value in fields.items()})
        if len(combinations) == 1:
            RULES.require(config, arch)
        if RULES.allows(config, arch):
            found[config] = None
    return list(found)


def _axes(direction: Direction, given: dict[str, Any]) -> Iterable[tuple[str, list[Any]]]:
    """Fields and the values that options give them; in triples None stands for what is not given."""
    yield from triple_axes(given, lambda _: (None, None, None))
    if any(key in given for key in _VECTORS):
        lists = [as_list(given.pop(key, None)) for key in _VECTORS]
        yield "vector_sizes", [list(sizes) for sizes in itertools.product(*lists)]
    for field in (*_WORDS, *_FLAGS, *_COUNTS):
        if field in given:
            yield field, [_checked(field, value) for value in as_list(given.pop(field))]
    if "double_smem_buffer" in given:
        values = [_checked("double_smem_buffer", value) for value in as_list(given.pop("double_smem_buffer"))]
        yield "double_smem_buffer", [(Switch.ON if value else Switch.OFF).value for value in values]
    enabled = _checked("streamk_enabled", given.pop("streamk_enabled", False))
    strategy = str(given.pop("streamk_reduction_strategy", "linear")).lower()
    if enabled:
        yield "streamk", [CONFIGS[direction].coerce("streamk", strategy).value]
    if given:
        raise InvalidArgumentError(
            f"there is no option {min(given)!r}",
            field=min(given),
            value=given[min(given)],
            rule="generate_option",
            fix=f"use some of: {', '.join(GENERATE_OPTIONS)}",
        )


def _checked(option: str, value: Any) -> Any:
    """Flags are booleans: a text such as ``false`` must not count as true."""
    if option in (*_FLAGS, "double_smem_buffer", "streamk_enabled") and type(value) is not bool:
        raise InvalidArgumentError(
            f"{option} is neither true nor false",
            field=option,
            value=str(value),
            rule="option_boolean",
            fix="give true or false",
        )
    return value
