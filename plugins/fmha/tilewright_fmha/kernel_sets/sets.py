"""Kernel sets of the three operations: what is worth having on every arch, and the receipts.

``default``: examples of everything that candidates come from, some dozens for an arch. ``essential``: what is
built and checked for every GPU. ``tiny``: one kernel. ``tests``: a few of each kind. ``full``: every type, size of
heads and cut. Each receipt is a set of its own, of usual heads in the preferred
cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_fmha.config.config import CONFIGS, FmhaConfig
from tilewright_fmha.config.decode import decode_algorithms
from tilewright_fmha.config.warp_specialised import HEADS, specialised_algorithms
from tilewright_fmha.kernel_sets.choices import first_offered, offered
from tilewright_fmha.kernel_sets.profiles import PROFILES
from tilewright_fmha.kernel_sets.receipts import EXTENDED, Receipt
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BiasKind,
    Family,
    FmhaDType,
    KvLookup,
    MaskKind,
    Mode,
    QScale,
    Rope,
    SmallType,
)
from tilewright_kit.kernel_sets.declare import ANY, Declaration, KernelSet, declare

__all__ = ["KERNEL_SETS", "SET_NAMES"]

Declarations = Iterator[Declaration[FmhaConfig]]

SET_NAMES = ("default", "essential", "tiny", "tests", "full")
_FLOATS = [FmhaDType.FP32, FmhaDType.FP16, FmhaDType.BF16]
_HALF = [FmhaDType.FP16, FmhaDType.BF16]
_HEADS = [(64, 64), (128, 128)]
_MORE_HEADS = [(32, 32), (48, 80), (80, 96), (96, 128), (160, 160), (192, 128), (192, 192), (256, 256)]
_ALL_HEADS = [*_MORE_HEADS, *_HEADS, (48, 48), (80, 80), (96, 96)]
_HOPPER = ("sm_90*",)
_USUAL: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (64, 64): ((192, 128), (128, 128)), (128, 128): ((128, 128),), (192, 128): ((128, 128),), (256, 256): ((128, 64),),
}  # fmt: skip
"""Queries and keys of the tiles that planners mostly take of Hopper's own kernels, by heads."""
_CUT: Mapping[str, Any] = {"pipeline": ANY, "tile": ANY, "wave": ANY, "warp_tile": ANY}
_DECODE = (Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL)


def _kernels(config: type[FmhaConfig], **fields: Any) -> Declaration[FmhaConfig]:
    return declare(config, **{**_CUT, **fields})


def _attention(config: type[FmhaConfig], few: bool = False) -> Declarations:
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
        yield from _specialised(config)
    yield from _decoding(config)


def _specialised(config: type[FmhaConfig]) -> Declarations:
    """Hopper's own: every cut with a causal mask and without, and each feature in a cut that most problems get."""
    plain: dict[str, Any] = {"mask": MaskKind.CAUSAL, "lse": True}
    pages: dict[str, Any] = {**plain, "paged": True}
    features: tuple[dict[str, Any], ...] = (
        {**plain, "dtype": FmhaDType.FP16},
        {**plain, "mode": Mode.GROUP},
        {"mask": MaskKind.CAUSAL, "softcap": True, "learned_sinks": True},
        {"mask": MaskKind.WINDOW, "sink": True, "skip_min_seqlen_q": True, "mode": Mode.GROUP},
        {**pages, "family": Family.PAGEDKV},
        {**pages, "family": Family.BATCH_PREFILL, "mode": Mode.GROUP, "kv_lookup": KvLookup.SGLANG},
    )
    for hdim in HEADS:
        for cut in specialised_algorithms(hdim):
            own = {"dtype": FmhaDType.BF16, "hdim": hdim, **cut}
            yield declare(config, **own, mask=[MaskKind.NONE, MaskKind.CAUSAL]).on(*_HOPPER)
            if cut["tile"][:2] in _USUAL[hdim]:
                yield from (declare(config, **{**own, **fields}).on(*_HOPPER) for fields in features)
    yield from _specialised_decoding(config, pages)


def _specialised_decoding(config: type[FmhaConfig], pages: Mapping[str, Any]) -> Declarations:
    """Hopper's own for few rows: every cut, and what caches in pages and windows need with the fewest rows."""
    features: tuple[Mapping[str, Any], ...] = (
        pages,
        {**pages, "mode": Mode.GROUP, "kv_lookup": KvLookup.SGLANG},
        {"mask": MaskKind.WINDOW, "sink": True, "softcap": True, "learned_sinks": True, "skip_min_seqlen_q": True},
    )
    for dtype, heads in ((FmhaDType.BF16, HEADS), (FmhaDType.BF16FP8, _HEADS)):
        for hdim in heads:
            own: dict[str, Any] = {"family": Family.SPLITKV, "max_splits_log2": 5, "dtype": dtype, "hdim": hdim}
            cuts = list(decode_algorithms(hdim, dtype))
            yield from (declare(config, **own, **cut).on(*_HOPPER) for cut in cuts)
            if hdim in _HEADS:
                yield from (declare(config, **{**own, **cuts[0], **fields}).on(*_HOPPER) for fields in features)


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


def _backward(config: type[FmhaConfig], few: bool = False) -> Declarations:
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


def _append(config: type[FmhaConfig], few: bool = False) -> Declarations:
    yield _kernels(config, dtype=ANY, hdim=_HEADS[:1] if few else _HEADS)
    yield _kernels(config, dtype=_HALF, hdim=(128, 128), rope=[Rope.INTERLEAVED, Rope.HALF])
    yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), rope=Rope.HALF, rope_dtype=SmallType.FP32)
    yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), paged=True, kv_layout=ANY, kv_lookup=ANY)
    yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), mode=Mode.GROUP, paged=True)


_KINDS = {ATTENTION: _attention, ATTENTION_BACKWARD: _backward}


def _plain(config: type[FmhaConfig]) -> Mapping[str, Any]:
    """Gradients are the same in every run, unless somebody asks for others."""
    return {"family": Family.DQ_DK_DV, "deterministic": True} if config.operation == ATTENTION_BACKWARD else {}


def _tests(config: type[FmhaConfig]) -> Declarations:
    yield _kernels(config, dtype=_FLOATS, hdim=(64, 64), **_plain(config))
    if config.operation == ATTENTION:
        yield _kernels(config, dtype=FmhaDType.BF16, hdim=(128, 128), mask=MaskKind.CAUSAL, lse=True)
        yield _kernels(config, dtype=FmhaDType.BF16, hdim=(64, 64), mode=Mode.GROUP)
        for family in _DECODE:
            fields: dict[str, Any] = {"dtype": FmhaDType.BF16, "hdim": (64, 64), "family": family, "paged": True}
            yield _kernels(config, **fields, mode=Mode.GROUP if family is Family.BATCH_PREFILL else Mode.BATCH)


def _full(config: type[FmhaConfig]) -> Declarations:
    yield _kernels(config, dtype=ANY, hdim=_ALL_HEADS, **_plain(config))
    if config.operation == ATTENTION:
        for family in _DECODE:
            mode = Mode.GROUP if family is Family.BATCH_PREFILL else Mode.BATCH
            yield _kernels(config, family=family, dtype=FmhaDType.BF16, hdim=_ALL_HEADS, mode=mode, paged=True)


def _of_receipt(config: type[FmhaConfig], receipt: Receipt) -> Declarations:
    """Usual heads with every mask and bias that the receipt has, in batches and groups."""
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


def _sets(config: type[FmhaConfig]) -> dict[str, KernelSet[FmhaConfig]]:
    kinds = _KINDS.get(config.operation, _append)
    found: dict[str, tuple[str, tuple[Declaration[FmhaConfig], ...]]] = {
        "default": ("What candidates come from, with every feature", tuple(kinds(config))),
        "essential": ("GPUs: every feature in the usual cut", tuple(kinds(config, True))),
        "tiny": ("One kernel", (_kernels(config, dtype=FmhaDType.FP32, hdim=(64, 64), **_plain(config)),)),
        "tests": ("A few kernels of each kind", tuple(_tests(config))),
        "full": ("Every type, size of heads and cut", tuple(_full(config))),
    }
    for name, receipt in PROFILES.items():
        declared = tuple(_of_receipt(config, receipt))
        if declared:
            found[name] = (f"Receipt {receipt.number}: usual heads in the preferred cut", declared)
    whole = ("full",)
    return {
        name: KernelSet(name, text, declarations, offered if name in whole else first_offered_shapes)
        for name, (text, declarations) in found.items()
    }


def first_offered_shapes(field: str, arch: Any, partial: Mapping[str, Any]) -> Any:
    """The preferred cut; of all other fields everything."""
    choose = first_offered if field in _CUT else offered
    return choose(field, arch, partial)


KERNEL_SETS: Mapping[str, Mapping[str, KernelSet[FmhaConfig]]] = {
    operation: _sets(config) for operation, config in CONFIGS.items()
}
