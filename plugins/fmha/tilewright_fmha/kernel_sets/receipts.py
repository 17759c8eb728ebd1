"""Receipts: numbered lists of kernels that the system which Tilewright rebuilds generates for its users, as filters.

A receipt says which values fields may have. What it does not name may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    KV_APPEND,
    OPERATIONS,
    BiasKind,
    FmhaDType,
    Mode,
    QScale,
    VLayout,
)
from tilewright_kit.kernel_sets.options import named

__all__ = ["EVERY", "EXTENDED", "RECEIPTS", "Receipt", "receipt_of"]

_FORWARD, _BACKWARD = (ATTENTION,), (ATTENTION_BACKWARD,)
_HALF = (FmhaDType.FP16, FmhaDType.BF16)
_AITER = (*_HALF, FmhaDType.FP8BF16)
_EIGHT = (FmhaDType.FP8BF16, FmhaDType.FP8FP32)
_LARGE = (128, 192)
"""Elements of heads of q that lists with 8-bit floats have."""
_NOTHING_SCALED: Mapping[str, Sequence[Any]] = {"qscale": (QScale.NONE,)}
_NO_SKIP: Mapping[str, Sequence[Any]] = {"skip_min_seqlen_q": (False,)}


@dataclass(frozen=True)
class Receipt:
    """One list: its number, name, the operations that it has kernels of, and values by field."""

    number: int
    name: str
    operations: tuple[str, ...] = OPERATIONS
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    eight_bit_heads: tuple[int, ...] = ()
    """Heads of q of 8-bit kernels; empty: any."""
    heads: tuple[int, ...] = ()
    """Heads of q of all kernels; empty: any."""

    def takes(self, config: FmhaConfig) -> bool:
        """True if the list has kernels like this one."""
        if config.operation not in self.operations:
            return False
        if any(getattr(config, name) not in values for name, values in self.fields.items()):
            return False
        q = config.hdim[0]
        eight = config.kv.bytes == 1 and self.eight_bit_heads
        return (not eight or q in self.eight_bit_heads) and (not self.heads or q in self.heads)


_NOT_FP32 = tuple(dtype for dtype in FmhaDType if dtype is not FmhaDType.FP32)
_BATCH, _GROUP = {"mode": (Mode.BATCH,)}, {"mode": (Mode.GROUP,)}
_ROWS = {"v_layout": (VLayout.VR,)}
_FLASH_BIAS = {"bias": (BiasKind.NONE, BiasKind.ALIBI)}

EXTENDED = 1
"""The list that also has kernels that wait for what they load, beside those that do not."""

RECEIPTS: Mapping[int, Receipt] = {
    item.number: item
    for item in (
        Receipt(0, "ck_default", fields={"dtype": _NOT_FP32}),
        Receipt(EXTENDED, "ck_extended", fields={"dtype": _NOT_FP32}),
        Receipt(
            2,
            "flash_fwd",
            (ATTENTION, KV_APPEND),
            {"dtype": _HALF, **_FLASH_BIAS, **_NOTHING_SCALED, **_NO_SKIP, "sink": (False,)},
        ),
        Receipt(3, "flash_bwd", _BACKWARD, {"dtype": _HALF, **_FLASH_BIAS}),
        Receipt(
            4,
            "pytorch",
            OPERATIONS,
            {
                "dtype": _HALF,
                "bias": (BiasKind.NONE, BiasKind.ELEMENTWISE),
                **_NOTHING_SCALED,
                **_NO_SKIP,
                "softcap": (False,),
                "sink": (False,),
                **_ROWS,
            },
        ),
        Receipt(100, "aiter_batch", _FORWARD, {"dtype": _AITER, **_BATCH, **_ROWS}, _LARGE),
        Receipt(200, "aiter_group", _FORWARD, {"dtype": _AITER, **_GROUP, **_ROWS}),
        Receipt(300, "aiter_bwd_batch", _BACKWARD, {"dtype": _HALF, **_BATCH}),
        Receipt(400, "aiter_bwd_group", _BACKWARD, {"dtype": _HALF, **_GROUP}),
        Receipt(600, "aiter_cpp", _FORWARD, {"dtype": _AITER, **_ROWS}, _LARGE),
        Receipt(800, "fp32_all", fields={"dtype": (FmhaDType.FP32,), **_NO_SKIP, "softcap": (False,)}),
        Receipt(
            801,
            "fp32_min",
            _FORWARD,
            {
                "dtype": (FmhaDType.FP32,),
                **_NO_SKIP,
                "softcap": (False,),
                **_BATCH,
                "bias": (BiasKind.NONE,),
                "lse": (False,),
                "dropout": (False,),
                **_NOTHING_SCALED,
            },
            heads=(48, 128),
        ),
        Receipt(888, "fp8_test", _FORWARD, {"dtype": _EIGHT}, _LARGE),
    )
}

EVERY = Receipt(-1, "all")
"""The profile without a filter."""


def receipt_of(number: int) -> Receipt:
    """The list of that number. Raises ``NotFoundError``."""
    numbers = {str(item): receipt for item, receipt in RECEIPTS.items()}
    return named(numbers, str(number), "receipt")
