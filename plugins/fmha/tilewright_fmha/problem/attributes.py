"""The attributes of the three operations: each checked, with defaults, before any tensor is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.problem.philox import drop_below
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    KV_APPEND,
    MASK_ALIASES,
    ROPE_ALIASES,
    KvLayout,
    KvLookup,
    MaskWord,
    QScale,
    Rope,
)
from tilewright_kit.requests.attributes import (
    DEFAULT_ALIGNMENT,
    known_names,
    refuse,
    take_alignment,
    take_dtype,
    take_finite,
    take_flag,
    take_int,
    take_word,
    wrong_type,
)
from tilewright_kit.types.dtypes import DType

__all__ = [
    "KNOWN_ATTRIBUTES",
    "MAX_PAGE_SIZE",
    "MAX_SPLITS",
    "MOST",
    "Attributes",
    "check_page_size",
    "read_attributes",
]

MAX_SPLITS = 1024
MAX_PAGE_SIZE = 1024
MOST = 2**31 - 1
"""Lengths and places of sequences are int32 tensors."""

_LEAST = 1e-30
"""Bounds of a factor of scores: products with scores are normal numbers of fp32."""

_MASKED = ("scale", "causal", "mask", "window_left", "window_right", "mask_align", "sink_size", "softcap")
_DROPPED = ("dropout_p", "seed", "offset")
_LENGTHS = ("max_seqlen_q", "max_seqlen_k", "alignment")
_PAGES = ("page_size", "kv_layout", "kv_lookup")
KNOWN_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    ATTENTION: (
        *_MASKED, *_DROPPED, *_LENGTHS, *_PAGES, "return_lse", "return_randval", "return_status", "qscale",
        "scale_block_q", "scale_block_k", "num_splits", "min_seqlen_q", "out_dtype",
    ),
    ATTENTION_BACKWARD: (*_MASKED, *_DROPPED, *_LENGTHS, "return_randval", "return_dbias", "deterministic"),
    KV_APPEND: (*_LENGTHS, *_PAGES, "rope", "rotary_dim", "return_status"),
}  # fmt: skip
"""Attributes of each operation."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """Checked as far as that goes without tensors. None: not given."""

    scale: float = 0.0
    mask: Mask = Mask()  # noqa: RUF009 - a frozen dataclass
    softcap: float = 0.0
    dropout: int = 0
    seed: int = 0
    offset: int = 0
    lse: bool = False
    randval: bool = False
    status: bool = False
    dbias: bool = False
    deterministic: bool = True
    max_q: int | None = None
    max_k: int | None = None
    page_size: int | None = None
    kv_layout: KvLayout | None = None
    kv_lookup: KvLookup | None = None
    qscale: QScale | None = None
    scale_block_q: int = 128
    scale_block_k: int = 128
    num_splits: int = 0
    min_q: int = 0
    rope: Rope | None = None
    rotary_dim: int = 0
    out_dtype: DType | None = None
    alignment: int = DEFAULT_ALIGNMENT


def read_attributes(given: Mapping[str, Any], operation: str) -> Attributes:
    """Check all attributes of a request. Raises ``InvalidArgumentError``."""
    known_names(given, KNOWN_ATTRIBUTES[operation])
    dropout = _dropout(given)
    randval = take_flag(given, "return_randval")
    if randval and not dropout:
        raise refuse(
            "there are no random values to return: nothing is dropped",
            "attributes.return_randval",
            True,
            "randval_without_dropout",
            "give dropout_p above 0, or leave return_randval out",
        )
    return Attributes(
        scale=_factor(given, "scale"),
        mask=_mask(given),
        softcap=_softcap(given),
        dropout=dropout,
        seed=take_int(given, "seed", 0, 0, 2**63 - 1) if dropout else 0,
        offset=take_int(given, "offset", 0, 0, 2**32 - 1) if dropout else 0,
        lse=take_flag(given, "return_lse"),
        randval=randval,
        status=take_flag(given, "return_status"),
        dbias=take_flag(given, "return_dbias"),
        deterministic=take_flag({"deterministic": True, **given}, "deterministic"),
        max_q=_most(given, "max_seqlen_q"),
        max_k=_most(given, "max_seqlen_k"),
        page_size=_page_size(given),
        kv_layout=take_word(given, "kv_layout", KvLayout, {}, "a layout of caches"),
        kv_lookup=take_word(given, "kv_lookup", KvLookup, {}, "a way to look up pages"),
        qscale=take_word(given, "qscale", QScale, {"no_scale": "no"}, "a way to scale fp8 operands"),
        scale_block_q=take_int(given, "scale_block_q", 128, 1, MOST),
        scale_block_k=take_int(given, "scale_block_k", 128, 1, MOST),
        num_splits=take_int(given, "num_splits", 0, 0, MAX_SPLITS),
        min_q=take_int(given, "min_seqlen_q", 0, 0, MOST),
        rope=take_word(given, "rope", Rope, ROPE_ALIASES, "a way to rotate"),
        rotary_dim=take_int(given, "rotary_dim", 0, 0, MOST),
        out_dtype=take_dtype(given, "out_dtype"),
        alignment=min(take_alignment(given), DEFAULT_ALIGNMENT),
    )


def _most(given: Mapping[str, Any], name: str) -> int | None:
    return take_int(given, name, 1, 1, MOST) if name in given else None


def _dropout(given: Mapping[str, Any]) -> int:
    value = given.get("dropout_p", 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type("dropout_p", value, "a number")
    if not 0 <= value < 1:
        raise refuse(
            f"dropout_p {value} is no probability of dropping something",
            "attributes.dropout_p",
            value,
            "dropout_range",
            "give a number from 0 to below 1",
        )
    take_int(given, "seed", 0, 0, 2**63 - 1)
    take_int(given, "offset", 0, 0, 2**32 - 1)
    return drop_below(float(value))


def _factor(given: Mapping[str, Any], name: str) -> float:
    """A number that scores are multiplied by or divided by; 0 if it is not given."""
    value = take_finite(given, name, 0.0)
    if value and not _LEAST <= abs(value) <= 1 / _LEAST:
        raise refuse(
            f"fp32, in which scores are computed, has no room for a {name} of {value:g}",
            f"attributes.{name}",
            value,
            "attribute_range",
            f"give a number from {_LEAST:g} to {1 / _LEAST:g} in size",
        )
    return value


def _softcap(given: Mapping[str, Any]) -> float:
    value = _factor(given, "softcap")
    if "softcap" in given and value <= 0:
        raise refuse(
            f"a soft cap of {value:g} leaves no scores",
            "attributes.softcap",
            value,
            "softcap_positive",
            "give a number above 0, or leave softcap out",
        )
    return value


def _page_size(given: Mapping[str, Any]) -> int | None:
    value = given.get("page_size")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type("page_size", value, "an integer")
    check_page_size(value, "attributes.page_size")
    return value


def check_page_size(value: int, field: str) -> None:
    if not 1 <= value <= MAX_PAGE_SIZE or value & (value - 1):
        raise refuse(
            f"pages of {value} tokens are not possible",
            field,
            value,
            "page_size_power",
            f"use a power of two from 1 to {MAX_PAGE_SIZE}",
        )


# ---- masks ----


def _mask(given: Mapping[str, Any]) -> Mask:
    causal = take_flag(given, "causal")
    word = _word(given)
    left, right = (_window(given, name) for name in ("window_left", "window_right"))
    align = _align(given)
    sink = take_int(given, "sink_size", 0, 0, MOST)
    bottom_right = align == "bottom_right"
    if word in (MaskWord.TOP_LEFT, MaskWord.BOTTOM_RIGHT):
        own = word.value
        if align is not None and align != own:
            raise _conflict("mask_align", align, f"the mask {word} begins at the {own.replace('_', ' ')}")
        if right not in (None, 0):
            raise _conflict("window_right", right, f"the mask {word} hides all to the right of the diagonal")
        bottom_right, right = word is MaskWord.BOTTOM_RIGHT, 0
    elif word is MaskWord.NONE:
        for name, value in (("window_left", left), ("window_right", right)):
            if value is not None and value >= 0:
                raise _conflict(name, value, "the mask is no")
    if causal:
        if word is MaskWord.NONE or (word is MaskWord.GENERIC and right not in (None, 0)) or right not in (None, 0):
            raise _conflict("causal", True, "another mask is given beside it")
        right = 0
    left, right = -1 if left is None else left, -1 if right is None else right
    # Without a left bound nothing is hidden that the first keys would have to be spared from.
    return Mask(left, right, bottom_right, sink if left >= 0 else 0)


def _word(given: Mapping[str, Any]) -> MaskWord | None:
    value = given.get("mask")
    if value is None and "mask" not in given:
        return None
    if not isinstance(value, str):
        raise wrong_type("mask", value, "the name of a mask")
    name = MASK_ALIASES.get(value, value)
    if name not in [item.value for item in MaskWord]:
        raise refuse(
            f"there is no mask {value!r}",
            "attributes.mask",
            value,
            "mask_word",
            f"use one of: {', '.join(item.value for item in MaskWord)}",
        )
    return MaskWord(name)


def _align(given: Mapping[str, Any]) -> str | None:
    value = given.get("mask_align")
    if value is None and "mask_align" not in given:
        return None
    if not isinstance(value, str):
        raise wrong_type("mask_align", value, "a name")
    name = MASK_ALIASES.get(value, value)
    if name not in ("top_left", "bottom_right"):
        raise refuse(
            f"a mask cannot begin at {value!r}",
            "attributes.mask_align",
            value,
            "mask_word",
            "use top_left (as PyTorch does) or bottom_right (as FlashAttention does)",
        )
    return name


def _window(given: Mapping[str, Any], name: str) -> int | None:
    if name not in given:
        return None
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, value, "an integer")
    if not -1 <= value <= MOST:
        raise refuse(
            f"{name} cannot be {value}",
            f"attributes.{name}",
            value,
            "window_range",
            f"give the keys that are seen beside the diagonal, 0 to {MOST}, or -1 for all",
        )
    return value


def _conflict(name: str, value: object, why: str) -> Exception:
    return refuse(
        f"{name} is {value}, but {why}",
        f"attributes.{name}",
        value,
        "mask_conflict",
        f"leave {name} out, or say the whole mask with mask=generic, window_left, window_right and mask_align",
    )
