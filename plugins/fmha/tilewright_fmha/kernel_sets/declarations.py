"""Declarations of kernels of attention, for the sets that are put together from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.kernel_sets.receipts import EXTENDED, Receipt
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BiasKind,
    Family,
    FmhaDType,
    MaskKind,
    Mode,
    QScale,
    Rope,
    SmallType,
)
from tilewright_kit.kernel_sets.declare import ANY, Declaration, declare

__all__ = ["CUT", "default_kernels", "full_kernels", "receipt_kernels", "tests_kernels", "tiny_kernel"]

Declarations = Iterator[Declaration[FmhaConfig]]

_FLOATS = [FmhaDType.FP32, FmhaDType.FP16, FmhaDType.BF16]
_HALF = [FmhaDType.FP16, FmhaDType.BF16]
_HEADS = [(64, 64), (128, 128)]
_MORE_HEADS = [(32, 32), (48, 80), (80, 96), (96, 128), (160, 160), (192, 128), (192, 192), (256, 256)]
_ALL_HEADS = [*_MORE_HEADS, *_HEADS, (48, 48), (80, 80), (96, 96)]
CUT: Mapping[str, Any] = {"pipeline": ANY, "tile": ANY, "wave": ANY, "warp_tile": ANY}
_DECODE = (Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL)


def _kernels(config: type[FmhaConfig], **fields: Any) -> Declaration[FmhaConfig]:
    return declare(config, **{**CUT, **fields})


def _attention(config: type[FmhaConfig], few: bool, more: Iterable[Declaration[FmhaConfig]]) -> Declarations:
    """Forward kernels: each feature alone, the families that read caches, and what combines parts."""
    yield _kernels(config, dtype=_FLOATS, hdim=_HEADS[:1] if few else _HEADS, lse=[False, True])
    yield _kernels(config, dtype=_HALF, hdim=(128, 128), mask=[MaskKind.CAUSAL, MaskKind.WINDOW])
    plain: dict[str, Any] = {"dtype": FmhaDType.BF16, "hdim": (64, 64)}
    yield _kernels(config, **plain, mode=Mode.GROUP, mask=MaskKind.CAUSAL, lse=True)
    yield _kernels(config, **plain, bias=[BiasKind.ELEMENTWISE, BiasKind.ALIBI])
    yield _kernels(config, **plain, bias=BiasKind.ELEMENTWISE, dtype_bias=SmallType.FP32)
    yield _kernels(config, **plain, dropout=True, randval=[False, True], lse=True)
    yield _kernels(config, **plain, softcap=True, mask=MaskKind.CAUSAL)
    yield _kernels(config, **plain, mask=MaskKind.WINDOW, sink=True, learned_sinks=True)
    yield _kernels(config, **plain, mode=Mode.GROUP, skip_min_seqlen_q=True)
    yield _kernels(config, dtype=FmhaDType.FP16, hdim=(64, 64), v_layout="vc")
    yield _kernels(config, dtype=ANY, hdim=(128, 128))
    eight = [FmhaDType.FP8BF16, FmhaDType.FP8FP32]
    yield _kernels(config, dtype=eight, hdim=(128, 128), qscale=[QScale.PERTENSOR, QScale.BLOCKSCALE])
    if not few:
        yield _kernels(config, dtype=FmhaDType.FP16, hdim=_MORE_HEADS)
        yield _kernels(config, dtype=FmhaDType.FP32, hdim=_MORE_HEADS, mask=MaskKind.CAUSAL)
        yield from more
    yield from _decoding(config)


def _decoding(config: type[FmhaConfig]) -> Declarations:
    split: dict[str, Any] = {"family": Family.SPLITKV, "max_splits_log2": 5}
    yield _kernels(config, **split, dtype=_FLOATS, hdim=(128, 128), lse=True)
    yield _kernels(config, **split, dtype=FmhaDType.BF16, hdim=(128, 128), paged=True, learned_sinks=True)
    yield _kernels(config, **split, dtype=FmhaDType.BF16, hdim=(64, 64), mode=Mode.GROUP, mask=MaskKind.CAUSAL)
    combine = Family.COMBINE
    yield _kernels(config, family=combine, dtype=_FLOATS, hdim=(128, 128), lse=[False, True])
    yield _kernels(config, family=combine, dtype=FmhaDType.BF16, hdim=(64, 64), mode=Mode.GROUP, learned_sinks=True)
    paged: dict[str, Any] = {"dtype": FmhaDType.BF16, "hdim": (128, 128), "paged": True, "kv_layout": ANY}
    yield _kernels(config, family=Family.PAGEDKV, **paged, kv_lookup=ANY)
    yield _kernels(config, family=Family.BATCH_PREFILL, **paged, kv_lookup=ANY, mode=Mode.GROUP, mask=MaskKind.CAUSAL)
    scaled: dict[str, Any] = {"dtype": FmhaDType.FP8BF16, "qscale": QScale.KV_BLOCKSCALE}
    yield _kernels(config, family=Family.BATCH_PREFILL, **{**paged, **scaled}, mode=Mode.GROUP)
    mixed = {**paged, "dtype": FmhaDType.BF16FP8, "qscale": QScale.PERTENSOR}
    yield _kernels(config, family=Family.PAGEDKV, **mixed)


def _backward(config: type[FmhaConfig], few: bool) -> Declarations:
    for family in (Family.DQ_DK_DV, Family.DOT_DO_O, Family.CONVERT_DQ):
        yield _kernels(config, family=family, dtype=_FLOATS, hdim=_HEADS[:1] if few else _HEADS, deterministic=True)
    plain: dict[str, Any] = {"dtype": FmhaDType.BF16, "hdim": (64, 64), "deterministic": True}
    yield _kernels(config, **{**plain, "deterministic": False})
    yield _kernels(config, **plain, mode=[Mode.BATCH, Mode.GROUP], mask=MaskKind.CAUSAL)
    yield _kernels(config, **plain, mask=MaskKind.WINDOW, sink=True, learned_sinks=True)
    yield _kernels(config, **plain, bias=BiasKind.ELEMENTWISE, dbias=[False, True])
    yield _kernels(config, **plain, bias=BiasKind.ALIBI, softcap=True)
    yield _kernels(config, **plain, dropout=True, randval=[False, True], mask=MaskKind.CAUSAL)
    if not few:
        yield _kernels(config, dtype=FmhaDType.FP16, hdim=_MORE_HEADS, deterministic=True)


def _append(config: type[FmhaConfig], few: bool) -> Declarations:
    yield _kernels(config, dtype=ANY, hdim=_HEADS[:1] if few else _HEADS)
    yield _kernels(config, dtype=_HALF, hdim=(128, 128), rope=[Rope.INTERLEAVED, Rope.HALF])
    yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), rope=Rope.HALF, rope_dtype=SmallType.FP32)
    yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), paged=True, kv_layout=ANY, kv_lookup=ANY)
    yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), mode=Mode.GROUP, paged=True)


def default_kernels(
    config: type[FmhaConfig], few: bool = False, more: Iterable[Declaration[FmhaConfig]] = ()
) -> Declarations:
    """Kernels with every feature; in the usual cut if ``few``. ``more``: kernels that pipelines declare."""
    own = (declaration for declaration in more if declaration.config_type is config)
    if config.operation == ATTENTION:
        yield from _attention(config, few, own)
    elif config.operation == ATTENTION_BACKWARD:
        yield from _backward(config, few)
        yield from own
    else:
        yield from _append(config, few)


def _plain(config: type[FmhaConfig]) -> Mapping[str, Any]:
    """Gradients are the same in every run, unless somebody asks for others."""
    return {"family": Family.DQ_DK_DV, "deterministic": True} if config.operation == ATTENTION_BACKWARD else {}


def tiny_kernel(config: type[FmhaConfig]) -> Declaration[FmhaConfig]:
    """One kernel."""
    return _kernels(config, dtype=FmhaDType.FP32, hdim=(64, 64), **_plain(config))


def tests_kernels(config: type[FmhaConfig]) -> Declarations:
    """A few kernels of each kind."""
    yield _kernels(config, dtype=_FLOATS, hdim=(64, 64), **_plain(config))
    if config.operation == ATTENTION:
        yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), mask=MaskKind.CAUSAL, lse=True)
        yield _kernels(config, dtype=FmhaDType.BF16, hdim=(64, 64), mode=Mode.GROUP)
        for family in _DECODE:
            fields: dict[str, Any] = {"dtype": FmhaDType.BF16, "hdim": (64, 64), "family": family, "paged": True}
            yield _kernels(config, **fields, mode=Mode.GROUP if family is Family.BATCH_PREFILL else Mode.BATCH)


def full_kernels(config: type[FmhaConfig]) -> Declarations:
    """Every type, size of heads and cut."""
    yield _kernels(config, dtype=ANY, hdim=_ALL_HEADS, **_plain(config))
    if config.operation == ATTENTION:
        for family in _DECODE:
            mode = Mode.GROUP if family is Family.BATCH_PREFILL else Mode.BATCH
            yield _kernels(config, family=family, dtype=FmhaDType.BF16, hdim=_ALL_HEADS, mode=mode, paged=True)


def receipt_kernels(config: type[FmhaConfig], receipt: Receipt) -> Declarations:
    """Usual heads with every mask and bias that the receipt has, in batches and groups; of kernels over caches, split
    ones and what combines their parts, those with every mask.
    """
    if config.operation not in receipt.operations:
        return
    dtypes = list(receipt.fields.get("dtype", FmhaDType))
    fields: dict[str, Any] = {"mask": ANY, "mode": list(receipt.fields.get("mode", Mode))}
    if config.operation == ATTENTION:
        fields["bias"] = list(receipt.fields.get("bias", BiasKind))
        fields["lse"] = list(receipt.fields.get("lse", (False, True)))
    elif config.operation == ATTENTION_BACKWARD:
        fields["bias"] = list(receipt.fields.get("bias", BiasKind))
        fields["deterministic"] = [False, True]
    else:
        fields = {"rope": ANY, "mode": fields["mode"]}
    for dtype in dtypes:
        heads = receipt.heads or (receipt.eight_bit_heads if dtype.kv.bytes == 1 else ())
        pairs = [(size, 128 if size == 192 else size) for size in heads] or _HEADS
        fields |= {"dtype": dtype, "hdim": pairs, "receipt": receipt.number}
        yield _kernels(config, **fields)
        if receipt.number == EXTENDED and config.operation == ATTENTION:
            yield _kernels(config, **fields, pipeline="qr")
        if config.operation == ATTENTION:
            yield from _receipt_caches(config, receipt, {name: fields[name] for name in ("dtype", "hdim", "mask")})


def _receipt_caches(config: type[FmhaConfig], receipt: Receipt, fields: Mapping[str, Any]) -> Declarations:
    """A receipt's kernels over caches and split ones, of one type. Not every list is for batches and for groups."""
    own = {**fields, "receipt": receipt.number}
    modes = list(receipt.fields.get("mode", Mode))
    yield _kernels(config, **own, family=Family.SPLITKV, max_splits_log2=5, mode=modes, paged=[False, True])
    parts = {"dtype": fields["dtype"], "hdim": fields["hdim"]}
    yield _kernels(config, **parts, family=Family.COMBINE, mode=modes)
    paged = [(Family.PAGEDKV, Mode.BATCH), (Family.BATCH_PREFILL, Mode.GROUP)]
    yield from (_kernels(config, **own, family=name, mode=mode, paged=True) for name, mode in paged if mode in modes)
