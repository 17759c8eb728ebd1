"""Configurations in the form of the system that Tilewright rebuilds: nested dictionaries, identifiers, file names.

``from_seed`` reads the nested form, ``to_seed`` writes it. ``seed_identifier`` is its identifier, which leaves out soft
caps, the waves and warp tiles of the third product, constraint tags and the arch: two kernels may share one, which is
why nothing here is looked up by it. ``seed_file`` is its name of a generated file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.rules.judging import tile_length
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

__all__ = ["from_seed", "seed_file", "seed_identifier", "to_seed"]

_MASKS = {MaskKind.NO: 0, MaskKind.CAUSAL: 1, MaskKind.WINDOW: 3}
_MASK_KINDS = {
    MaskWord.NO: MaskKind.NO,
    MaskWord.TOP_LEFT: MaskKind.CAUSAL,
    MaskWord.BOTTOM_RIGHT: MaskKind.CAUSAL,
    MaskWord.GENERIC: MaskKind.WINDOW,
}
_BIASES = {BiasKind.NO: 0, BiasKind.ELEMENTWISE: 1, BiasKind.ALIBI: 2}
_SCALES = {QScale.NO: 0, QScale.PERTENSOR: 1, QScale.BLOCKSCALE: 2, QScale.KV_BLOCKSCALE: 3}
_ROPES = {Rope.NONE: 0, Rope.INTERLEAVED: 1, Rope.HALF: 2}
_LAYOUTS = {KvLayout.VECTORIZED: 0, KvLayout.LINEAR: 1}
_LOOKUPS = {KvLookup.VLLM: 0, KvLookup.SGLANG: 1}
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


def from_seed(record: Mapping[str, Any]) -> FmhaConfig:
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
            _refuse(f"{section} has no key {key!r}", f"{section}.{key}", rest[key], "seed_keys", "leave it out")
    return config_of(family).from_dict(fields)


def _algorithm(algorithm: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"pipeline": str(algorithm.pop("pipeline", "qr"))}
    if fields["pipeline"] == "qr_async_trload_v3":
        fields["pipeline"] = "v3"
    for key in _SIZES:
        numbers = algorithm.pop(key, _DEFAULTS[key])
        if not isinstance(numbers, (list, tuple)):
            _refuse(f"{key} is no list", f"algorithm.{key}", numbers, "seed_sizes", f"give {list(_DEFAULTS[key])}")
        own = [_integer(number, key) for number in numbers]
        # Waves and warp tiles of products that are not named are the default's.
        fields["warp_tile" if key == "warp" else key] = own + list(_DEFAULTS[key][len(own) :] if key != "tile" else ())
    pads = algorithm.pop("padding", [True] * 4)
    if not isinstance(pads, (list, tuple)) or len(pads) != 4:
        _refuse("padding is four", "algorithm.padding", pads, "seed_sizes", "give those of s, sk, d and dv")
    fields |= {name: _flag(pad, name) for name, pad in zip(_PADS, pads, strict=True)}
    fields |= {name: _integer(algorithm.pop(key), key) for key, name in _COUNTS.items() if key in algorithm}
    fields["use_trload"] = _flag(algorithm.pop("use_trload", False), "use_trload")
    alignments = [algorithm.pop(f"hdim_{letter}_alignment", 8) for letter in "qv"]
    fields["hdim_align"] = [_integer(number, "hdim_alignment") for number in alignments]
    fields["constraint_tag"] = str(algorithm.pop("constraint_tag", ""))
    return fields


def to_seed(config: FmhaConfig, arch: str = "") -> dict[str, Any]:
    """The nested form. Read back, it gives the configuration as far as the form goes: it knows neither learned sinks
    nor types of bias and rotary tables, nor what is ours in algorithms.
    """
    signature: dict[str, Any] = {
        "family": config.family.value,
        "data_type": config.dtype.value,
        "mode": config.mode.value,
        "vlayout": config.v_layout.value[1],
        "hdim_q": config.hdim[0],
        "hdim_v": config.hdim[1],
        "mask": {MaskKind.CAUSAL: "top_left", MaskKind.WINDOW: "generic"}.get(config.mask, "no"),
        "bias": "bias" if config.bias is BiasKind.ELEMENTWISE else config.bias.value,
        "qscale": config.qscale.value,
        "rope": config.rope.value,
        "kv_memory_layout": config.kv_layout.value,
        "kv_lookup_table": config.kv_lookup.value,
        "page_size": config.page_size,
        "receipt": config.receipt,
    }
    signature |= {key: getattr(config, name) for key, name in _FLAGS.items()}
    algorithm: dict[str, Any] = {
        "pipeline": config.pipeline,
        "tile": list(config.tile),
        "wave": list(config.wave),
        "warp": list(config.warp_tile),
        "padding": [getattr(config, name) for name in _PADS],
        "use_trload": config.use_trload,
        "hdim_q_alignment": config.hdim_align[0],
        "hdim_v_alignment": config.hdim_align[1],
        "constraint_tag": config.constraint_tag,
    }
    algorithm |= {key: getattr(config, name) for key, name in _COUNTS.items()}
    record = {"signature": signature, "algorithm": algorithm}
    return {"arch": arch, **record} if arch else record


def seed_identifier(config: FmhaConfig) -> str:
    """The identifier that the kernel would have had."""
    mode = config.mode.value
    parts = [
        f"fmha_{config.family}_{config.dtype}_{mode}_{config.v_layout}_hq{config.hdim[0]}_hv{config.hdim[1]}",
        f"p{config.pipeline}",
        f"m{_MASKS[config.mask]}_b{_BIASES[config.bias]}_lse{config.lse:d}_do{config.dropout:d}",
        f"qs{_SCALES[config.qscale]}_rp{_ROPES[config.rope]}_pkv{config.paged:d}",
        f"sq{config.qscale is QScale.PERTENSOR:d}_sk{config.skip_min_seqlen_q:d}_sink{config.sink:d}",
        f"db{config.dbias:d}_sr{config.randval:d}_det{config.deterministic:d}",
        f"km{_LAYOUTS[config.kv_layout]}_kl{_LOOKUPS[config.kv_lookup]}_ps{config.page_size or 1}",
        f"t{'x'.join(map(str, config.tile[: tile_length(config)]))}",
        f"w0{'x'.join(map(str, config.wave[:3]))}_w1{'x'.join(map(str, config.wave[3:6]))}",
        f"wt0{'x'.join(map(str, config.warp_tile[:3]))}_wt1{'x'.join(map(str, config.warp_tile[3:6]))}",
        f"pads{''.join(str(int(getattr(config, name))) for name in _PADS)}_tr{config.use_trload:d}",
        f"bpc{config.block_per_cu}_wg{config.num_wave_groups}_ms{config.max_splits_log2}_mq{config.max_seq_len_q}",
        f"aq{config.hdim_align[0]}_av{config.hdim_align[1]}_r{config.selection_rank}_rc{config.receipt}",
    ]
    return "_".join(parts)


def seed_file(config: FmhaConfig) -> str:
    """The name of the file that it would have been generated to: twelve digits of a digest tell kernels apart."""
    record = json.dumps(to_seed(config), sort_keys=True)
    digest = hashlib.sha1(record.encode(), usedforsecurity=False).hexdigest()[:12]
    q, v = config.hdim
    return f"fmha_{config.family}_{config.dtype}_{config.mode}_h{q}x{v}_{config.pipeline}_{digest}"


def _section(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    if not isinstance(value, Mapping):
        _refuse(f"{key} is no object", key, str(value), "seed_section", "give signature and algorithm as objects")
    return dict(value)


def _member(kind: type[Any], word: str, field: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        known = ", ".join(item.value for item in kind)
        _refuse(f"there is no {field} {word!r}", f"signature.{field}", word, "seed_words", f"use one of: {known}")


def _integer(value: Any, field: str) -> int:
    if type(value) is not int:
        _refuse(f"{field} is not an integer", field, str(value), "seed_integer", "give an integer")
    return int(value)


def _flag(value: Any, field: str) -> bool:
    if type(value) is not bool:
        _refuse(f"{field} is neither true nor false", field, str(value), "seed_boolean", "give true or false")
    return bool(value)


def _refuse(reason: str, field: str, value: Any, rule: str, fix: str) -> NoReturn:
    raise InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)
