"""Configurations in the nested dictionaries of Composable Kernel's dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.vocabulary import (
    DTYPE_ALIASES,
    MASK_ALIASES,
    ROPE_ALIASES,
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    KvLookup,
    MaskKind,
    MaskWord,
    Mode,
    QScale,
    Rope,
    VLayout,
)
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["is_foreign", "read_foreign"]

_MASKS = {MaskKind.NONE: 0, MaskKind.CAUSAL: 1, MaskKind.WINDOW: 3}
_MASK_KINDS = {
    MaskWord.NONE: MaskKind.NONE,
    MaskWord.TOP_LEFT: MaskKind.CAUSAL,
    MaskWord.BOTTOM_RIGHT: MaskKind.CAUSAL,
    MaskWord.GENERIC: MaskKind.WINDOW,
}
_SCALES = {QScale.NONE: 0, QScale.PERTENSOR: 1, QScale.BLOCKSCALE: 2, QScale.KV_BLOCKSCALE: 3}
_LAYOUTS = {KvLayout.VECTORIZED: 0, KvLayout.LINEAR: 1}
_FLAGS: Mapping[str, str] = {
    "lse": "lse",
    "dropout": "dropout",
    "logits": "softcap",
    "paged_kv": "paged",
    "sink": "sink",
    "skip_min_seqlen_q": "skip_min_seqlen_q",
    "dbias": "dbias",
    "store_randval": "randval",
    "deterministic": "deterministic",
}
_PADS = ("pad_s", "pad_sk", "pad_d", "pad_dv")
_COUNTS = {
    "block_per_cu": "block_per_cu",
    "num_wave_groups": "num_wave_groups",
    "max_splits_log2": "max_splits_log2",
    "max_seq_len_q": "max_seq_len_q",
    "selection_rank": "selection_rank",
}
_SIZES = ("tile", "wave", "warp")
_DEFAULTS: Mapping[str, tuple[int, ...]] = {
    "tile": (128, 64, 32, 128, 32, 128),
    "wave": (2, 2, 1, 2, 2, 1, 1, 1, 1),
    "warp": (32, 32, 16, 32, 32, 16, 16, 16, 16),
}


def is_foreign(record: Mapping[str, Any]) -> bool:
    """Tell if a record is in that form: it has sections, which no configuration of ours has."""
    return "algorithm" in record or "signature" in record


def read_foreign(record: Mapping[str, Any]) -> FmhaConfig:
    """The configuration that a record means, valid or not. What it leaves out has the value that it had there.

    Raises ``InvalidArgumentError`` for missing sections, unknown words and keys, and wrong types.
    """
    signature, algorithm = (_section(record, name) for name in ("signature", "algorithm"))
    family = _member(Family, str(signature.pop("family", "fwd")), "family")
    scale = signature.pop("qscale", "no")
    if signature.pop("fp8_static_quant", False) is True:
        scale = QScale.PERTENSOR.value
    dtype = str(signature.pop("data_type", signature.pop("dtype", "fp16")))
    mask = str(signature.pop("mask", "no"))
    q = signature.pop("hdim_q", 128)
    fields: dict[str, Any] = {
        "family": family,
        "dtype": _member(FmhaDType, DTYPE_ALIASES.get(dtype, dtype), "data_type"),
        "mode": _member(Mode, str(signature.pop("mode", "batch")), "mode"),
        "v_layout": _member(VLayout, {"r": "vr", "c": "vc"}.get(*(str(signature.pop("vlayout", "r")),) * 2), "vlayout"),
        "hdim": [_integer(q, "hdim_q"), _integer(signature.pop("hdim_v", q), "hdim_v")],
        "mask": _MASK_KINDS[_member(MaskWord, MASK_ALIASES.get(mask, mask), "mask")],
        "bias": _member(BiasKind, {"bias": "elementwise"}.get(*(str(signature.pop("bias", "no")),) * 2), "bias"),
        "qscale": _member(QScale, {"no_scale": "no"}.get(str(scale), str(scale)), "qscale"),
        "rope": _member(Rope, ROPE_ALIASES.get(*(str(signature.pop("rope", "none")),) * 2), "rope"),
        "kv_layout": _member(KvLayout, str(signature.pop("kv_memory_layout", "vectorized")), "kv_memory_layout"),
        "kv_lookup": _member(KvLookup, str(signature.pop("kv_lookup_table", "sglang")), "kv_lookup_table"),
        "page_size": _integer(signature.pop("page_size", 1), "page_size"),
        "receipt": _integer(signature.pop("receipt", -1), "receipt"),
    }
    fields |= {name: _flag(signature.pop(key), key) for key, name in _FLAGS.items() if key in signature}
    if not fields.get("paged"):  # there, what a cache would be like has a value without one
        fields |= {"kv_layout": KvLayout.LINEAR, "kv_lookup": KvLookup.VLLM, "page_size": 0}
    elif fields["page_size"] == 1 and fields["kv_layout"] is KvLayout.VECTORIZED:
        fields["page_size"] = 0  # its default, which stands for pages of any size
    fields |= _algorithm(algorithm)
    for section, rest in (("signature", signature), ("algorithm", algorithm)):
        if rest:
            key = min(rest)
            _refuse(f"{section} has no key {key!r}", f"{section}.{key}", rest[key], "foreign_keys", "leave it out")
    return config_of(family).from_dict(fields)


def _algorithm(algorithm: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"pipeline": str(algorithm.pop("pipeline", "qr"))}
    if fields["pipeline"] == "qr_async_trload_v3":
        fields["pipeline"] = "v3"
    for key in _SIZES:
        numbers = algorithm.pop(key, _DEFAULTS[key])
        if not isinstance(numbers, (list, tuple)):
            _refuse(f"{key} is no list", f"algorithm.{key}", numbers, "foreign_sizes", f"give {list(_DEFAULTS[key])}")
        own = [_integer(number, key) for number in numbers]
        # Waves and warp tiles of products that are not named are the default's.
        fields["warp_tile" if key == "warp" else key] = own + list(_DEFAULTS[key][len(own) :] if key != "tile" else ())
    pads = algorithm.pop("padding", [True] * 4)
    if not isinstance(pads, (list, tuple)) or len(pads) != 4:
        _refuse("padding is four", "algorithm.padding", pads, "foreign_sizes", "give those of s, sk, d and dv")
    fields |= {name: _flag(pad, name) for name, pad in zip(_PADS, pads, strict=True)}
    fields |= {name: _integer(algorithm.pop(key), key) for key, name in _COUNTS.items() if key in algorithm}
    fields["use_trload"] = _flag(algorithm.pop("use_trload", False), "use_trload")
    alignments = [algorithm.pop(f"hdim_{letter}_alignment", 8) for letter in "qv"]
    fields["hdim_align"] = [_integer(number, "hdim_alignment") for number in alignments]
    fields["constraint_tag"] = str(algorithm.pop("constraint_tag", ""))
    return fields


def _section(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    if not isinstance(value, Mapping):
        _refuse(f"{key} is no object", key, str(value), "foreign_section", "give signature and algorithm as objects")
    return dict(value)


def _member(kind: type[Any], word: str, field: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        known = ", ".join(item.value for item in kind)
        _refuse(f"there is no {field} {word!r}", f"signature.{field}", word, "foreign_words", f"use one of: {known}")


def _integer(value: Any, field: str) -> int:
    if type(value) is not int:
        _refuse(f"{field} is not an integer", field, str(value), "foreign_integer", "give an integer")
    return int(value)


def _flag(value: Any, field: str) -> bool:
    if type(value) is not bool:
        _refuse(f"{field} is neither true nor false", field, str(value), "foreign_boolean", "give true or false")
    return bool(value)


def _refuse(reason: str, field: str, value: Any, rule: str, fix: str) -> NoReturn:
    raise InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)
