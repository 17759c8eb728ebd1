"""Generation of many kernels at once, selected by options."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import CONFIGS, FLAGS, FmhaConfig
from tilewright_fmha.config.defaults import cpu_algorithm
from tilewright_fmha.kernel_sets.profiles import profile_of
from tilewright_fmha.kernel_sets.receipts import Receipt, receipt_of
from tilewright_fmha.pipelines.algorithms import valid_algorithms
from tilewright_fmha.pipelines.kernel_sets import KERNEL_SETS, SET_NAMES
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.vocabulary import (
    ATTENTION,
    DTYPE_ALIASES,
    FAMILY_OPERATIONS,
    MASK_ALIASES,
    ROPE_ALIASES,
    Family,
    MaskWord,
)
from tilewright_kit.kernel_sets.options import as_list, named
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["GENERATE_OPTIONS", "TILE_OPTIONS", "select_set"]

_TILE = tuple(f"tile_{name}" for name in ("m0", "n0", "k0", "n1", "k1", "k0max"))
_WAVE = tuple(f"wave_{axis}{stage}" for stage in range(3) for axis in "mnk")
_WARP = tuple(f"warp_{axis}{stage}" for stage in range(3) for axis in "mnk")
TILE_OPTIONS: Mapping[str, tuple[str, ...]] = {"tile": _TILE, "wave": _WAVE, "warp_tile": _WARP}
"""Options by the field whose numbers they name, in order."""

_WORDS = {
    "datatype": "dtype", "mask": "mask", "bias": "bias", "mode": "mode", "v_layout": "v_layout", "qscale": "qscale",
    "rope": "rope", "kv_layout": "kv_layout", "kv_lookup": "kv_lookup", "pipeline": "pipeline",
}  # fmt: skip
"""Options that are words, and their fields."""
_NUMBERS = ("page_size", "block_per_cu", "max_splits_log2", "max_seq_len_q", "selection_rank")
_SWITCHES = (*FLAGS, "pad_s", "pad_sk", "pad_d", "pad_dv", "pack_gqa", "persistent")

GENERATE_OPTIONS = (
    "rule_set", "family", "receipt", "profile", "hdim", "hdim_v", *_WORDS, *_TILE, *_WAVE, *_WARP, *_NUMBERS,
    *_SWITCHES,
)  # fmt: skip
"""Names of what ``select_set`` takes, beside the arch."""

_MASKS = {
    MaskWord.NONE.value: "no",
    MaskWord.TOP_LEFT.value: "causal",
    MaskWord.BOTTOM_RIGHT.value: "causal",
    MaskWord.GENERIC.value: "window",
}
"""Abilities that kernels need for named masks: the start of a diagonal is a number."""
_SCALES = {"no_scale": "no"}


def select_set(
    arch: ArchSpec,
    operation: str = ATTENTION,
    *,
    rule_set: str = "",
    family: str = "",
    receipt: int | str | None = None,
    profile: str = "",
    **options: Any,
) -> list[FmhaConfig]:
    """The valid kernels of a kernel set (``rule_set``; default: those of the receipt or profile, else ``default``) of
    which the receipt or profile has some, and that all options allow; without set, receipt and profile, but with other
    options: the kernel that these describe, or every valid one where options are lists. Kernels of a receipt have what
    options name, dropout for example, in place of what is usual, as far as the receipt has such kernels.

    An option that is None counts as not given; flags are true or false, not texts. Raises ``NotFoundError`` for an
    unknown set, receipt, profile or family, ``InvalidArgumentError`` for an unknown or malformed option, and
    ``ConfigInvalidError`` if a single described kernel is not valid.
    """
    given = {name: value for name, value in options.items() if value is not None and value != ""}
    families = {item.value: item for item in Family}
    wanted = named(families, family, "family") if family else None
    if wanted is not None:
        operation = FAMILY_OPERATIONS[wanted]
    chosen = _receipt(receipt, profile)
    axes = _axes(CONFIGS[operation], given)
    if axes and chosen is None and not rule_set:
        return _described(arch, operation, wanted, axes)
    sets = KERNEL_SETS[operation]
    own = chosen.name if chosen is not None and chosen.name in sets else "default"
    kernels = named(sets, (rule_set or own).replace("-", "_"), "kernel set", "rule_set", (*SET_NAMES, *sets))
    members = kernels.expand(arch, RULES)
    return [
        config
        for config in (members if chosen is None or rule_set else _with_options(members, axes, arch))
        if (wanted is None or config.family is wanted)
        and (chosen is None or chosen.takes(config))
        and _allowed_by(config, axes)
    ]


def _with_options(
    configs: Iterable[FmhaConfig], axes: Mapping[str, list[Any]], arch: ArchSpec
) -> dict[FmhaConfig, None]:
    """The kernels with every combination of what options name but for sizes, cut anew where that makes them others."""
    words = {name: values for name, values in axes.items() if name != "hdim" and name not in TILE_OPTIONS}
    found: dict[FmhaConfig, None] = {}
    for config in configs:
        for values in itertools.product(*words.values()):
            other = config.replace(**dict(zip(words, values, strict=True)))
            if other != config:  # the same pipeline if that can have the option
                other = other.replace(**(_cut(other, arch, True, {}) or _cut(other, arch, False, {})))
                if not RULES.allows(other, arch):
                    continue
            found[other] = None
    return found


def _receipt(number: int | str | None, profile: str) -> Receipt | None:
    if number is not None and number != "":
        return receipt_of(int(number)) if str(number).lstrip("-").isdigit() else profile_of(str(number))
    return profile_of(profile) if profile else None


def _axes(config_type: type[FmhaConfig], options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Fields and the values that options give them; in tuples None stands for what is not given."""
    given = dict(options)
    found: dict[str, list[Any]] = {}
    if "hdim" in given or "hdim_v" in given:
        heads = as_list(given.pop("hdim", None))
        values = as_list(given.pop("hdim_v")) if "hdim_v" in given else None
        pairs = [(q, q) for q in heads] if values is None else itertools.product(heads, values)
        found["hdim"] = [tuple(pair) for pair in pairs]
    for field, names in TILE_OPTIONS.items():
        if any(name in given for name in names):
            found[field] = list(itertools.product(*(as_list(given.pop(name, None)) for name in names)))
    for option, field in _WORDS.items():
        if option in given:
            words = [_word(option, str(word)) for word in as_list(given.pop(option))]
            found[field] = [config_type.coerce(field, word) for word in words]
    for name in (*_NUMBERS, *_SWITCHES):
        if name in given:
            found[name] = [config_type.coerce(name, value) for value in as_list(given.pop(name))]
    if given:
        name = min(given)
        raise InvalidArgumentError(
            f"there is no option {name!r}",
            field=name,
            value=given[name],
            rule="generate_option",
            fix=f"use some of: {', '.join(GENERATE_OPTIONS)}",
        )
    return found


def _word(option: str, word: str) -> str:
    if option == "datatype":
        return DTYPE_ALIASES.get(word, word)
    if option == "mask":
        return _MASKS.get(MASK_ALIASES.get(word, word), word)
    if option == "rope":
        return ROPE_ALIASES.get(word, word)
    return _SCALES.get(word, word) if option == "qscale" else {"bias": "elementwise"}.get(word, word)


def _allowed_by(config: FmhaConfig, axes: Mapping[str, list[Any]]) -> bool:
    """True if every option has the kernel's value among its own; None in a tuple allows all."""
    for field, values in axes.items():
        have = getattr(config, field)
        if not isinstance(have, tuple):
            if have not in values:
                return False
        elif not any(all(want in (None, size) for want, size in zip(item, have, strict=False)) for item in values):
            return False
    return True


def _described(
    arch: ArchSpec, operation: str, family: Family | None, axes: Mapping[str, list[Any]]
) -> list[FmhaConfig]:
    """Every combination of what is given, with the arch's preferred cut for what is not."""
    found: dict[FmhaConfig, None] = {}
    combinations = list(itertools.product(*axes.values()))
    for values in combinations:
        fields = dict(zip(axes, values, strict=True))
        numbers = {name: fields.pop(name) for name in TILE_OPTIONS if name in fields}
        heads = fields.pop("hdim", (None, None))
        if family is not None:
            fields["family"] = family
        config = CONFIGS[operation](**fields)
        config = config.replace(hdim=_filled(heads, config.hdim))
        cut = _cut(config, arch, "pipeline" in fields, numbers)
        config = config.replace(**cut)
        sizes = {name: _filled(given, getattr(config, name)) for name, given in numbers.items()}
        config = config.replace(**{name: config.coerce(name, value) for name, value in sizes.items()})
        if len(combinations) == 1:
            RULES.require(config, arch)
        if RULES.allows(config, arch):
            found[config] = None
    return list(found)


def _filled(given: tuple[int | None, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if want is None else want for want, size in itertools.zip_longest(given[: len(own)], own))


def _cut(
    config: FmhaConfig, arch: ArchSpec, keep_pipeline: bool, numbers: Mapping[str, tuple[int | None, ...]]
) -> Mapping[str, Any]:
    """The preferred cut of those with the numbers that are given, of all if there is none; one that the kernel's
    features leave registers for, if there is any.
    """
    cuts = (cpu_algorithm(config, arch),) if arch.kind == "cpu" else valid_algorithms(config, arch)
    fitting = [cut for cut in cuts if not keep_pipeline or cut["pipeline"] == config.pipeline]
    exact = [cut for cut in fitting if all(_filled(given, cut[name]) == cut[name] for name, given in numbers.items())]
    found = exact or fitting
    return next((cut for cut in found if RULES.allows(config.replace(**cut), arch)), found[0] if found else {})
