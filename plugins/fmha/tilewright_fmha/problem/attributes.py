"""The attributes of the three operations: each checked, with defaults, before any tensor is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_fmha.problem.declared.attributes import (
    ATTRIBUTES,
    CAUSAL,
    DETERMINISTIC,
    DROPOUT_P,
    HEAD_DIM_V,
    KV_LAYOUT,
    KV_LOOKUP,
    LEAST,
    MASK,
    MASK_ALIGN,
    MAX_PAGE_SIZE,
    MAX_SEQLEN_K,
    MAX_SEQLEN_Q,
    MIN_SEQLEN_Q,
    NUM_SPLITS,
    OFFSET,
    OUT_DTYPE,
    QSCALE,
    RETURN_DBIAS,
    RETURN_LSE,
    RETURN_RANDVAL,
    RETURN_SCORES,
    RETURN_STATUS,
    ROPE,
    ROTARY_DIM,
    SCALE,
    SCALE_BLOCK_K,
    SCALE_BLOCK_Q,
    SEED,
    SINK_SIZE,
    SOFTCAP,
    WINDOW_LEFT,
    WINDOW_RIGHT,
)
from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.problem.philox import drop_below
from tilewright_fmha.vocabulary import KvLayout, KvLookup, MaskWord, QScale, Rope, Scores
from tilewright_kit.contract.declaration import AttributeSpec
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

__all__ = ["Attributes", "check_page_size", "read_attributes"]


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
    scores: Scores = Scores.NONE
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
    head_dim_v: int = 0
    num_splits: int = 0
    min_q: int = 0
    rope: Rope | None = None
    rotary_dim: int = 0
    out_dtype: DType | None = None
    alignment: int = DEFAULT_ALIGNMENT


def read_attributes(given: Mapping[str, Any], operation: str) -> Attributes:
    """Check all attributes of a request. Raises ``InvalidArgumentError``."""
    known_names(given, ATTRIBUTES[operation])
    dropout = _dropout(given)
    randval = take_flag(given, RETURN_RANDVAL)
    if randval and not dropout:
        raise refuse(
            "there are no random values to return: nothing is dropped",
            "attributes.return_randval",
            True,
            "randval_without_dropout",
            "give dropout_p above 0, or leave return_randval out",
        )
    return Attributes(
        scale=_factor(given, SCALE),
        mask=_mask(given),
        softcap=_softcap(given),
        dropout=dropout,
        seed=take_int(given, SEED) if dropout else 0,
        offset=take_int(given, OFFSET) if dropout else 0,
        lse=take_flag(given, RETURN_LSE),
        randval=randval,
        scores=take_word(given, RETURN_SCORES, Scores, "a stage of the scores") or Scores.NONE,
        status=take_flag(given, RETURN_STATUS),
        dbias=take_flag(given, RETURN_DBIAS),
        deterministic=take_flag(given, DETERMINISTIC),
        max_q=_most(given, MAX_SEQLEN_Q),
        max_k=_most(given, MAX_SEQLEN_K),
        page_size=_page_size(given),
        kv_layout=take_word(given, KV_LAYOUT, KvLayout, "a layout of caches"),
        kv_lookup=take_word(given, KV_LOOKUP, KvLookup, "a way to look up pages"),
        qscale=take_word(given, QSCALE, QScale, "a way to scale fp8 operands"),
        scale_block_q=take_int(given, SCALE_BLOCK_Q),
        scale_block_k=take_int(given, SCALE_BLOCK_K),
        head_dim_v=take_int(given, HEAD_DIM_V),
        num_splits=take_int(given, NUM_SPLITS),
        min_q=take_int(given, MIN_SEQLEN_Q),
        rope=take_word(given, ROPE, Rope, "a way to rotate"),
        rotary_dim=take_int(given, ROTARY_DIM),
        out_dtype=take_dtype(given, OUT_DTYPE),
        alignment=take_alignment(given),
    )


def _most(given: Mapping[str, Any], spec: AttributeSpec) -> int | None:
    return take_int(given, spec) if spec.name in given else None


def _dropout(given: Mapping[str, Any]) -> int:
    value: Any = given.get(DROPOUT_P.name, DROPOUT_P.default)
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
    take_int(given, SEED)
    take_int(given, OFFSET)
    return drop_below(float(value))


def _factor(given: Mapping[str, Any], spec: AttributeSpec) -> float:
    """A number that scores are multiplied by or divided by; 0 if it is not given."""
    name = spec.name
    value = take_finite(given, spec)
    if value and not LEAST <= abs(value) <= 1 / LEAST:
        raise refuse(
            f"fp32, in which scores are computed, has no room for a {name} of {value:g}",
            f"attributes.{name}",
            value,
            "attribute_range",
            f"give a number from {LEAST:g} to {1 / LEAST:g} in size",
        )
    return value


def _softcap(given: Mapping[str, Any]) -> float:
    value = _factor(given, SOFTCAP)
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
    causal = take_flag(given, CAUSAL)
    mask = _word(given)
    left, right = (_window(given, spec) for spec in (WINDOW_LEFT, WINDOW_RIGHT))
    align = _align(given)
    sink = take_int(given, SINK_SIZE)
    bottom_right = align == "bottom_right"
    if mask in (MaskWord.TOP_LEFT, MaskWord.BOTTOM_RIGHT):
        own = mask.value
        if align is not None and align != own:
            raise _conflict("mask_align", align, f"the mask {mask} begins at the {own.replace('_', ' ')}")
        if right not in (None, 0):
            raise _conflict("window_right", right, f"the mask {mask} hides all to the right of the diagonal")
        bottom_right, right = mask is MaskWord.BOTTOM_RIGHT, 0
    elif mask is MaskWord.NONE:
        for name, value in (("window_left", left), ("window_right", right)):
            if value is not None and value >= 0:
                raise _conflict(name, value, "the mask is no")
    if causal:
        if mask is MaskWord.NONE or (mask is MaskWord.GENERIC and right not in (None, 0)) or right not in (None, 0):
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
    name = MASK.aliases.get(value, value)
    if name not in MASK.choices:
        raise refuse(
            f"there is no mask {value!r}",
            "attributes.mask",
            value,
            "mask_word",
            f"use one of: {', '.join(MASK.choices)}",
        )
    return MaskWord(name)


def _align(given: Mapping[str, Any]) -> str | None:
    value = given.get("mask_align")
    if value is None and "mask_align" not in given:
        return None
    if not isinstance(value, str):
        raise wrong_type("mask_align", value, "a name")
    name = MASK_ALIGN.aliases.get(value, value)
    if name not in MASK_ALIGN.choices:
        raise refuse(
            f"a mask cannot begin at {value!r}",
            "attributes.mask_align",
            value,
            "mask_word",
            "use top_left (as PyTorch does) or bottom_right (as FlashAttention does)",
        )
    return name


def _window(given: Mapping[str, Any], spec: AttributeSpec) -> int | None:
    name, lowest, highest = spec.name, spec.lowest or 0, spec.highest or 0
    if name not in given:
        return None
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, value, "an integer")
    if not lowest <= value <= highest:
        raise refuse(
            f"{name} cannot be {value}",
            f"attributes.{name}",
            value,
            "window_range",
            f"give the keys that are seen beside the diagonal, 0 to {highest}, or -1 for all",
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
