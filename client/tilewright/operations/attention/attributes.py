"""Arguments of attention, in the server's words: masks, windows, biases, seeds, layouts. Rules about shapes are
the server's.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.dispatch.operands.request import spec_of
from tilewright.errors import InvalidArgumentError
from tilewright.operations.epilogue import scale_operand
from tilewright.tensor.interop import DeviceTensor, recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.types.arguments import flag, number, unless
from tilewright.types.dtypes import dtype_name
from tilewright.types.spec import Array, Spec

__all__ = [
    "bias_operand",
    "block_words",
    "indices",
    "is_bshd",
    "mask_words",
    "scales_of",
    "score_words",
    "seeds",
    "stage_word",
    "type_word",
]

_LAYOUTS = {"bhsd": False, "bshd": True}
_BOTTOM_RIGHT = ("bottom_right", "b")
_INT32 = np.iinfo(np.int32)


def is_bshd(layout: Any) -> bool:
    """True if rows come before heads. Raises ``InvalidArgumentError`` for a word that is no layout."""
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise InvalidArgumentError(
            f"there is no layout {layout!r}",
            field="layout",
            value=layout,
            rule="layout_known",
            fix="use bhsd (heads before rows, as PyTorch's function has them) or bshd (rows before heads)",
        )
    return _LAYOUTS[layout]


# ---- operands ----


def indices(value: Any, field: str) -> Any:
    """Lengths, starts or page numbers as int32: lists and wider integers are converted."""
    if value is None or isinstance(value, (Spec, ResidentTensor, DeviceTensor)):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (tuple, list)):
        return value  # (shape, dtype)
    if recognise(value, field) is not None:
        return value
    array = as_indices(value, field)
    if array.dtype == np.int32:
        return array
    if array.size and (int(array.min()) < _INT32.min or int(array.max()) > _INT32.max):
        raise InvalidArgumentError(
            f"{field} has numbers beyond 32 bits",
            field=field,
            value=int(array.max()),
            rule="index_range",
            fix="correct them: nothing here is that long",
        )
    return array.astype(np.int32)


def as_indices(value: Any, field: str) -> Array:
    """Whole numbers as an array, of whatever width. Raises ``InvalidArgumentError``."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind not in "iu" and (array.size or isinstance(value, np.ndarray)):
        raise InvalidArgumentError(
            f"{field} has something in it that is no whole number",
            field=field,
            value=array.dtype.name,
            rule="index_dtype",
            fix="give int32 numbers: x.astype(numpy.int32)",
        )
    return array if array.size else array.astype(np.int32)


def bias_operand(attn_mask: Any, bias: Any) -> Any:
    """Operand that is added to scores: ``bias``, or the mask in PyTorch's sense, with four dimensions."""
    if attn_mask is not None and bias is not None:
        raise InvalidArgumentError(
            "attn_mask and bias are both added to scores",
            field="attn_mask",
            rule="one_bias",
            fix="add them up and pass one (a mask of bools: numpy.where(mask, bias, -inf))",
        )
    value, field = (bias, "bias") if attn_mask is None else (attn_mask, "attn_mask")
    if value is None:
        return None
    if isinstance(value, (Spec, tuple)):
        spec = spec_of(value, field)
        lead = 4 - len(spec.shape)
        if lead <= 0:
            return spec
        strides = None if spec.strides is None else (*[0] * lead, *spec.strides)
        return replace(spec, shape=(*[1] * lead, *spec.shape), strides=strides)
    if isinstance(value, ResidentTensor):
        return value
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.dtype is torch.bool:
            value = value.new_zeros(value.shape, dtype=torch.float32).masked_fill_(~value, -float("inf"))
    elif recognise(value, field) is None:
        if not isinstance(value, np.ndarray):
            plain = isinstance(value, (int, float, list))  # numbers of Python's, which have no type of their own
            value = np.asarray(value)
            value = value.astype(np.float32) if plain and value.dtype == np.float64 else value
        if value.dtype == np.bool_:
            value = np.where(value, np.float32(0), np.float32(-np.inf))
    lead = 4 - len(value.shape) if hasattr(value, "shape") and hasattr(value, "__getitem__") else 0
    return value[(None,) * lead] if lead > 0 else value


def seeds(dropout_p: Any, seed: Any, offset: Any, rng: Any) -> Any:
    """The operand that seeds dropout, so that one plan serves all seeds; None if nothing is dropped."""
    if number("dropout_p", dropout_p) == 0:
        for field, value in (("seed", seed), ("offset", offset or None), ("rng", rng)):
            if value is not None:
                raise no_effect(field, value, "nothing is dropped", "give dropout_p as well, or leave it out")
        return None
    if rng is not None:
        if seed is not None or offset:
            raise InvalidArgumentError(
                "rng and seed both say what dropout is seeded with",
                field="seed",
                value=seed,
                rule="seed_given_once",
                fix="leave one of them out",
            )
        return indices(rng, "rng")
    given = secrets.randbits(63) if seed is None else seed
    for field, value, bits in (("seed", given, 63), ("offset", offset, 32)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << bits:
            raise InvalidArgumentError(
                f"{field} is a number from 0 to below 2**{bits}",
                field=field,
                value=value,
                rule="seed_range",
                fix="give an int in that range, or leave it out",
            )
    words = [int(given) & 0xFFFFFFFF, int(given) >> 32, int(offset), 0]
    return np.array(words, np.uint32).view(np.int32)


# ---- attributes ----


def mask_words(is_causal: Any, mask: Any, window: Any, mask_align: Any, sink_size: Any) -> dict[str, Any]:
    """Attributes of the mask. Raises ``InvalidArgumentError`` for a window that is no pair."""
    found: dict[str, Any] = {"mask": mask, "mask_align": mask_align}
    causal = flag("is_causal", is_causal)
    if causal and mask in _BOTTOM_RIGHT:
        raise InvalidArgumentError(
            "is_causal begins at the top left, and the mask at the bottom right",
            field="mask",
            value=mask,
            rule="mask_conflict",
            fix="leave is_causal out",
        )
    if mask_align is not None and not causal and window is None and mask in (None, "no"):
        raise no_effect("mask_align", mask_align, "there is no mask that it could place", "give window or is_causal")
    if window is not None:
        found |= window_words(window)
        if causal and found["window_right"] in (-1, 0):
            found["window_right"], causal = 0, False
    if causal:
        found["causal"] = True
    if window is None and type(sink_size) is int and sink_size > 0 and mask in (None, "no"):
        raise no_effect("sink_size", sink_size, "there is no window that hides the first keys", "give window as well")
    found["sink_size"] = unless(sink_size, 0)
    return found


def window_words(window: Any) -> dict[str, Any]:
    """Attributes of a window. Raises ``InvalidArgumentError`` for what is no pair and no number."""
    pair = [window, window] if isinstance(window, (int, np.integer)) and not isinstance(window, bool) else window
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise InvalidArgumentError(
            "a window is how many keys are seen to the left and to the right of the diagonal",
            field="window",
            value=window,
            rule="window_pair",
            fix="give (left, right), None or -1 for no bound, or one number for both",
        )
    left, right = (-1 if side is None else side for side in pair)
    return {"window_left": left, "window_right": right}


def score_words(*, scale: Any, softcap: Any, dropout_p: Any, heads: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of scores. ``heads`` are those of queries and keys, if they must be as many."""
    found: dict[str, Any] = {"softcap": softcap, "dropout_p": unless(number("dropout_p", dropout_p), 0)}
    if scale is not None:
        if number("scale", scale) == 0:
            raise InvalidArgumentError(
                "with a scale of 0 all keys weigh the same",
                field="scale",
                value=scale,
                rule="scale_nonzero",
                fix="leave it out for 1 / sqrt(D), or give another number",
            )
        found["scale"] = float(scale)
    if heads and heads["q"] != heads["k"]:
        raise InvalidArgumentError(
            f"there are {heads['q'][0]} heads of queries and {heads['k'][0]} of keys, and enable_gqa is False",
            field="k.shape",
            value=heads["k"][0],
            rule="head_groups",
            fix="leave enable_gqa out: heads of queries then share those of keys",
        )
    return found


def scales_of(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Factors of fp8 operands: plain numbers as arrays of fp32."""
    given = {"q_descale": q, "k_descale": k, "v_descale": v}
    return {name: scale_operand(value, name) for name, value in given.items()}


def block_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of scales by blocks. Raises ``InvalidArgumentError`` for blocks of scales that are not there."""
    for field, scales in (("scale_block_q", ("q_descale",)), ("scale_block_k", ("k_descale", "v_descale"))):
        if given[field] is not None and all(given[name] is None for name in scales):
            raise no_effect(
                field,
                given[field],
                "there are no scales",
                f"leave it out, or give {' or '.join(scales)} of fp8 operands",
            )
    return {name: given[name] for name in ("qscale", "scale_block_q", "scale_block_k", "head_dim_v", "num_splits")}


def no_effect(field: str, value: object, why: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} has no effect: {why}", field=field, value=value, rule="no_effect", fix=fix)


def stage_word(value: Any) -> str:
    """The stage of the scores to return. Raises ``InvalidArgumentError`` for what is no word."""
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"return_scores names a stage of the scores, {value!r} does not",
            field="return_scores",
            value=value,
            rule="attribute_type",
            fix="give scaled, softcap, masked or probabilities",
        )
    return value


def type_word(out_dtype: Any) -> str | None:
    return None if out_dtype is None else dtype_name(out_dtype, "out_dtype")
