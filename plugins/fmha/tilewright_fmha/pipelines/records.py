"""The pipelines of attention, one record for each template.

A pipeline is added here: a record that names its template, features, tile shapes, cost, rules and kernels of the
default set, the template's header under ``native/include/tilewright``, and its tests. ``config/pipelines.py`` says in
which place its families prefer it. Archs have it by naming it in their specs.
"""

from __future__ import annotations

from functools import cache

from tilewright_arch import ArchSpec
from tilewright_fmha.candidates.direct import direct_cuts, direct_mismatches
from tilewright_fmha.candidates.gpu import backward_cuts, few_rows_cuts, row_cuts
from tilewright_fmha.candidates.warp_specialised import ws_algorithms, ws_cuts, ws_mismatches
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.pipelines import DIRECT, FEW_ROWS, SPECIALISED
from tilewright_fmha.cost.cpu import predict_cpu
from tilewright_fmha.cost.gpu import predict_gpu
from tilewright_fmha.cost.warp_specialised import predict_warp_specialised
from tilewright_fmha.kernel_sets.direct import DIRECT_DEFAULTS
from tilewright_fmha.kernel_sets.warp_specialised import WS_DEFAULTS
from tilewright_fmha.pipelines.record import Pipeline
from tilewright_fmha.pipelines.sources import direct_source, portable_source, ws_source
from tilewright_fmha.rules.hip import direct_form
from tilewright_fmha.rules.warp_specialised import ws_form
from tilewright_fmha.vocabulary import Family
from tilewright_kit.types.errors import UnsupportedError

__all__ = ["PIPELINES", "pipeline_of", "record_of"]

_F = Family
_FORWARD = (_F.FWD, _F.SPLITKV, _F.PAGEDKV, _F.BATCH_PREFILL)
_TYPES = frozenset({"fp32", "fp16", "bf16"})
_FP8 = frozenset({"fp8fp16", "fp8bf16", "fp8fp32"})
_MIXED = frozenset({"fp16fp8", "bf16fp8"})
_SCALES = frozenset({"pertensor", "blockscale", "kv_blockscale"})
_PLAIN_PAGES = frozenset({"paged_vllm", "paged_sglang"})
_PAGES = _PLAIN_PAGES | {"vectorized", "page_compiled"}
_MASKS = frozenset({"causal", "window", "token_sink"})
_SCORES = _MASKS | {"bias", "alibi", "dropout", "randval", "softcap", "softcap_bias"}
_ALL_FORWARD = (
    _TYPES | _FP8 | _MIXED | _SCALES | _PAGES | _SCORES | {"group", "lse", "learned_sink", "skip_min", "column_v"}
)
_SPECIALISED = frozenset({
    "fp16", "bf16", "group", "causal", "window", "token_sink", "softcap", "lse", "learned_sink", "skip_min",
    "persistent", "stages",
})  # fmt: skip
_SPECIALISED_BACKWARD = frozenset({"fp16", "bf16", "causal", "window", "learned_sink", "deterministic", "atomics"})
_DIRECT = frozenset({"fp16", "bf16", "group", "causal"})
_COMBINE = _TYPES | _FP8 | _MIXED | {"group", "lse", "learned_sink", "skip_min"}
_SCORES_STAGE = _TYPES | _FP8 | _MIXED | _PLAIN_PAGES | {"group", "bias"}
_MERGE = _TYPES | _FP8 | _MIXED | {"group", "skip_min"}
_APPEND = _TYPES | _FP8 | _MIXED | _PAGES | {"group", "rope_interleaved", "rope_half", "pertensor"}
_BACKWARD = _TYPES | _SCORES | {"group", "learned_sink", "skip_min", "dbias", "deterministic", "column_v"}
_BACKWARD_PARTS = _TYPES | {"group", "learned_sink", "skip_min", "bias", "dbias", "deterministic"}

_PORTABLE = (
    ("qr_async", _F.FWD), ("qr", _F.FWD), ("qr", _F.SPLITKV), ("qr_pagedkv", _F.PAGEDKV),
    ("qr_async", _F.BATCH_PREFILL), ("qr", _F.BATCH_PREFILL),
)  # fmt: skip
"""Loops on the portable blocks of GPUs."""

_GPUS = ("cuda", "hip")

PIPELINES: tuple[Pipeline, ...] = (
    Pipeline(
        names=("qr", "splitkv_combine", "appendkv", "bwd"),
        kinds=("cpu",),
        templates={
            **{("cpu", "qr", family): _ALL_FORWARD for family in _FORWARD},
            ("cpu", "splitkv_combine", _F.COMBINE): _COMBINE,
            ("cpu", "qr", _F.SCORES): _SCORES_STAGE,
            ("cpu", "splitkv_combine", _F.MERGE): _MERGE,
            ("cpu", "appendkv", _F.APPENDKV): _APPEND,
            ("cpu", "bwd", _F.DQ_DK_DV): _BACKWARD,
            ("cpu", "bwd", _F.DOT_DO_O): _BACKWARD_PARTS,
            ("cpu", "bwd", _F.CONVERT_DQ): _BACKWARD_PARTS,
        },
        source=portable_source,
        predict=predict_cpu,
    ),
    Pipeline(
        names=(DIRECT,),
        kinds=("hip",),
        templates={
            ("hip", DIRECT, _F.FWD): _DIRECT | {"lse"},
            ("hip", DIRECT, _F.DQ_DK_DV): _DIRECT | {"window", "deterministic", "atomics"},
        },
        source=direct_source,
        predict=predict_gpu,
        cuts=direct_cuts,
        rules=(direct_form,),
        mismatches=direct_mismatches,
        declarations=DIRECT_DEFAULTS,
    ),
    Pipeline(
        names=("qr", "qr_async", "qr_pagedkv", "qs", "qr_async_trload", "v3", "batch_prefill_async"),
        kinds=_GPUS,
        templates={
            **{
                (kind, pipeline, family): _ALL_FORWARD | {"pack_gqa"}
                for kind in _GPUS
                for pipeline, family in _PORTABLE
            },
            **{(kind, "qr", _F.SCORES): _SCORES_STAGE for kind in _GPUS},
        },
        source=portable_source,
        predict=predict_gpu,
        cuts=row_cuts,
    ),
    Pipeline(
        names=(SPECIALISED,),
        kinds=("cuda",),
        templates={
            ("cuda", SPECIALISED, _F.FWD): _SPECIALISED,
            ("cuda", SPECIALISED, _F.SPLITKV): _SPECIALISED | _MIXED | _PLAIN_PAGES | {"pack_gqa", "pertensor"},
            **{("cuda", SPECIALISED, family): _SPECIALISED | _PLAIN_PAGES for family in (_F.PAGEDKV, _F.BATCH_PREFILL)},
            ("cuda", SPECIALISED, _F.DQ_DK_DV): _SPECIALISED_BACKWARD,
        },
        source=ws_source,
        predict=predict_warp_specialised,
        cuts=ws_cuts,
        algorithms=ws_algorithms,
        rules=(ws_form,),
        mismatches=ws_mismatches,
        declarations=WS_DEFAULTS,
    ),
    Pipeline(
        names=(FEW_ROWS,),
        kinds=_GPUS,
        templates={("cuda", FEW_ROWS, _F.SPLITKV): _ALL_FORWARD - {"fp32"} | {"pack_gqa"}},
        source=portable_source,
        predict=predict_gpu,
        cuts=few_rows_cuts,
    ),
    Pipeline(
        names=("splitkv_combine", "appendkv"),
        kinds=_GPUS,
        templates={
            **{(kind, "splitkv_combine", _F.COMBINE): _COMBINE for kind in _GPUS},
            **{(kind, "splitkv_combine", _F.MERGE): _MERGE for kind in _GPUS},
            **{(kind, "appendkv", _F.APPENDKV): _APPEND for kind in _GPUS},
        },
        source=portable_source,
        predict=predict_gpu,
    ),
    Pipeline(
        names=("bwd",),
        kinds=_GPUS,
        templates={
            **{(kind, "bwd", _F.DQ_DK_DV): _BACKWARD | {"atomics"} for kind in _GPUS},
            **{(kind, "bwd", family): _BACKWARD_PARTS for kind in _GPUS for family in (_F.DOT_DO_O, _F.CONVERT_DQ)},
        },
        source=portable_source,
        predict=predict_gpu,
        cuts=backward_cuts,
    ),
)


@cache
def record_of(name: str, kind: str) -> Pipeline | None:
    """The record of a pipeline on a kind of device; None if there is none."""
    return next((record for record in PIPELINES if record.has(name, kind)), None)


def pipeline_of(config: FmhaConfig, arch: ArchSpec) -> Pipeline:
    """The record of a configuration's pipeline. Raises ``UnsupportedError`` if the kind of device has none."""
    found = record_of(config.pipeline, arch.kind)
    if found is None:
        raise UnsupportedError(
            f"there is no pipeline {config.pipeline} of attention for {arch.kind} devices",
            field="pipeline",
            value=config.pipeline,
            rule="template_exists",
            fix="choose another pipeline",
        )
    return found
