"""Rules on what a kernel computes: which features go together, and which an arch has."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.heads import CPU_MOST_HDIM, held_hdim, most_hdim
from tilewright_fmha.config.judging import must_be
from tilewright_fmha.config.latent import holds_latent
from tilewright_fmha.config.pipelines import family_pipelines, offers_specialised
from tilewright_fmha.vocabulary import (
    FAMILY_OPERATIONS,
    MAIN_FAMILIES,
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    MaskKind,
    QScale,
    Rope,
    vector_width,
)
from tilewright_kit.config.rules import Violation

__all__ = ["SIGNATURE_RULES", "plain_dtype"]

_PAGED = (Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL, Family.SCORES, Family.APPENDKV)
_UNSCALED = (FmhaDType.FP32, FmhaDType.FP16, FmhaDType.BF16)
LEAST_HDIM = 8


def plain_dtype(dtype: FmhaDType) -> FmhaDType:
    """The type of the output for all operands."""
    return FmhaDType(dtype.o.value)


def arch_known(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The arch says what it offers to attention."""
    if attention_of(arch) is None:
        reason = f"the spec of {arch.id} has no block for attention"
        yield Violation("arch_known", "family", config.family.value, reason)


def family_known(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The family is one of the operation's."""
    if FAMILY_OPERATIONS[config.family] != config.operation:
        own = [family for family, operation in FAMILY_OPERATIONS.items() if operation == config.operation]
        reason = f"kernels of {config.operation} are of: {', '.join(own)}"
        main = next((family for family in own if family in MAIN_FAMILIES), config.family)
        yield Violation("family_known", "family", config.family.value, reason, {"family": main} if own else {})


def dtype_arch(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The arch computes with these element types."""
    spec = attention_of(arch)
    if spec is None or config.dtype.value in spec.dtypes:
        return
    other = plain_dtype(config.dtype)
    if other.value not in spec.dtypes:
        other = FmhaDType(spec.dtypes[0])
    reason = f"{arch.id} has {', '.join(spec.dtypes)}"
    yield Violation("dtype_arch", "dtype", config.dtype.value, reason, {"dtype": other})


def backward_dtype(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Gradients are of fp32, fp16 and bf16."""
    if config.is_backward and config.dtype not in _UNSCALED:
        reason = "gradients are of fp32, fp16 and bf16: 8-bit floats have too few bits for them"
        yield from must_be("backward_dtype", config, "dtype", plain_dtype(config.dtype), reason)


def forward_dtype(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """All element types have operands that say what they mean: those with a factor for every 32 elements have none."""
    if config.dtype in (FmhaDType.MXFP8, FmhaDType.MXFP4):
        reason = "no operand carries a factor for every 32 elements of a head"
        yield from must_be("forward_dtype", config, "dtype", plain_dtype(config.dtype), reason)


def pipeline_arch(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The arch has the pipeline, and it is one of those of forward kernels or gradients. (The other families' rules
    name their own pipelines.)
    """
    spec = attention_of(arch)
    if spec is None:
        return
    if config.pipeline not in spec.pipelines and config.pipeline != "batch_prefill_async":
        reason = f"{arch.id} has pipelines {', '.join(spec.pipelines)}"
        fix = {"pipeline": family_pipelines(config.family, arch)[0]}
        yield Violation("pipeline_arch", "pipeline", config.pipeline, reason, fix)
    elif config.family is Family.FWD or config.is_backward:
        offered = family_pipelines(config.family, arch)
        if config.pipeline not in offered:
            reason = f"kernels of {config.family} have pipelines {', '.join(offered)}"
            yield Violation("pipeline_arch", "pipeline", config.pipeline, reason, {"pipeline": offered[0]})


def trload_support(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Reads that transpose on the way from the LDS need an arch that has them, and their pipeline."""
    spec = attention_of(arch)
    if config.use_trload and not (spec and spec.trload):
        reason = f"{arch.id} has no reads from LDS that transpose"
        yield Violation("trload_support", "use_trload", True, reason, {"use_trload": False})
    elif config.use_trload and config.pipeline not in ("qr_async_trload", "v3"):
        reason = f"pipeline {config.pipeline} does not read that way"
        yield Violation("trload_support", "use_trload", True, reason, {"use_trload": False})
    elif config.pipeline == "qr_async_trload" and not config.use_trload:
        reason = "the pipeline reads that way"
        yield Violation("trload_support", "use_trload", False, reason, {"use_trload": True})


def hdim_multiple_of_8(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Kernels hold heads of 8 to 256 elements, in multiples of 8; on CPUs up to 1024."""
    if holds_latent(config) and offers_specialised(arch):
        return
    most = most_hdim(arch)
    q, v = (min(max(-(-size // 8) * 8, LEAST_HDIM), most) for size in config.hdim)
    reason = f"kernels hold heads of {LEAST_HDIM} to {most} elements, in multiples of 8"
    if most < CPU_MOST_HDIM and max(config.hdim) > most:
        reason += f" (those of CPUs up to {CPU_MOST_HDIM})"
    yield from must_be("hdim_multiple_of_8", config, "hdim", (q, v), reason)


def hdim_arch(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Kernels are compiled for the sizes of heads that the arch lists, and on CPUs for large ones in steps; smaller
    ones are padded.
    """
    spec = attention_of(arch)
    listed = spec.hdims.get(config.dtype.value, ()) if spec else ()
    if not listed or config.hdim in listed or spec is None or (holds_latent(config) and offers_specialised(arch)):
        return
    other = held_hdim(arch, config.dtype.value, *config.hdim) or listed[-1]
    if other == config.hdim:
        return
    reason = f"kernels of {config.dtype} on {arch.id} hold heads of {', '.join(f'{q}x{v}' for q, v in listed[:12])}"
    yield Violation("hdim_arch", "hdim", config.hdim, reason, {"hdim": other})


# ---- features that need or exclude each other ----


def group_padding(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Sequences of different lengths end anywhere in a tile."""
    if config.varlen:
        for name in ("pad_s", "pad_sk"):
            reason = "sequences of different lengths end anywhere in a tile"
            yield from must_be("group_padding", config, name, True, reason)


def randval_dropout(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """There are random values where something is dropped."""
    if config.randval and not config.dropout:
        reason = "there are no random values without dropout"
        yield Violation("randval_dropout", "randval", True, reason, {"randval": False})


def dbias_bias(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The gradient of a bias needs an elementwise bias."""
    if config.dbias and config.bias is not BiasKind.ELEMENTWISE:
        reason = f"there is no gradient of a bias that is {config.bias}"
        yield Violation("dbias_bias", "dbias", True, reason, {"dbias": False})


def bias_type(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A bias, and rotary tables, are fp32 or of the queries' type; what the queries have is written ``as_q``."""
    used = (("dtype_bias", config.bias is BiasKind.ELEMENTWISE), ("rope_dtype", config.rope is not Rope.NONE))
    for name, is_used in used:
        word = getattr(config, name).value
        if is_used and word == "as_q" and config.q.bytes == 1:
            reason = f"queries are {config.q}, of which there are no small operands"
            yield Violation("bias_type", name, word, reason, {name: type(getattr(config, name)).FP32})
        elif is_used and word not in ("as_q", "fp32") and word != config.q.value:
            reason = f"it is fp32, or {config.q} as the queries are"
            yield Violation("bias_type", name, word, reason, {name: type(getattr(config, name)).FP32})
        elif is_used and word == config.q.value:
            reason = "what the queries have is written as_q, so that equal kernels have equal names"
            yield Violation("bias_type", name, word, reason, {name: type(getattr(config, name)).AS_Q})


def sink_mask(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """First keys that a window never hides need a window."""
    if config.sink and config.mask is not MaskKind.WINDOW:
        reason = "only a window hides the first keys"
        yield Violation("sink_mask", "sink", True, reason, {"sink": False})


def paged_family(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Pages are for the families that read or write a cache."""
    if config.paged and config.family not in _PAGED:
        reason = f"kernels of {config.family} read no pages"
        yield Violation("paged_family", "paged", True, reason, {"paged": False})


def vectorized_page(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """In the vectorized layout sixteen bytes of values are tokens of one page."""
    if config.kv_layout is KvLayout.VECTORIZED and config.page_size % vector_width(config.kv):
        reason = (
            f"pages of {config.page_size} tokens are no multiple of the {vector_width(config.kv)} that lie together"
        )
        yield Violation("vectorized_page", "kv_layout", "vectorized", reason, {"kv_layout": KvLayout.LINEAR})


def qscale_dtype(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Factors are for 8-bit floats."""
    if config.qscale is not QScale.NONE and config.kv.bytes != 1:
        reason = f"keys and values are {config.kv}, which needs no factors"
        yield Violation("qscale_dtype", "qscale", config.qscale.value, reason, {"qscale": QScale.NONE})


def kv_blockscale_paged(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A factor for each page needs pages."""
    if config.qscale is QScale.KV_BLOCKSCALE and not config.paged:
        reason = "there are no pages that could each have a factor"
        yield Violation("kv_blockscale_paged", "qscale", "kv_blockscale", reason, {"qscale": QScale.PERTENSOR})


def rope_family(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Rotation happens when keys are appended, once."""
    if config.rope is not Rope.NONE and config.family is not Family.APPENDKV:
        reason = "only kernels that append to a cache rotate"
        yield Violation("rope_family", "rope", config.rope.value, reason, {"rope": Rope.NONE})


def backward_features(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Gradients know neither pages nor factors."""
    if not config.is_backward:
        return
    reason = "gradients know neither pages nor factors"
    yield from must_be("backward_features", config, "paged", False, reason)
    yield from must_be("backward_features", config, "qscale", QScale.NONE, reason)


SIGNATURE_RULES = (
    arch_known, family_known, dtype_arch, backward_dtype, forward_dtype, hdim_multiple_of_8, pipeline_arch,
    trload_support, hdim_arch, group_padding, randval_dropout, dbias_bias, bias_type, sink_mask, paged_family,
    vectorized_page, qscale_dtype, kv_blockscale_paged, rope_family, backward_features,
)  # fmt: skip
