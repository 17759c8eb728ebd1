"""From a configuration to its translation unit: a template file with the configuration's constants filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from tilewright_arch import ArchSpec
from tilewright_fmha import __version__
from tilewright_fmha.config.config import FLAGS, FmhaConfig
from tilewright_fmha.config.latent import is_latent
from tilewright_fmha.pipelines.records import pipeline_of
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.pipelines.sources import portable_source
from tilewright_fmha.vocabulary import Family, Scheduling, VLayout
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.contract.templates import symbol_of, template, texts
from tilewright_kit.types.dtypes import DType

__all__ = ["NATIVE_FAMILIES", "generate", "product_type", "render", "render_gpu", "symbol_of"]

NATIVE_FAMILIES: Mapping[Family, str] = {
    Family.FWD: "forward",
    Family.SPLITKV: "split",
    Family.COMBINE: "combine",
    Family.PAGEDKV: "paged",
    Family.BATCH_PREFILL: "prefill",
    Family.SCORES: "forward",
    Family.MERGE: "combine",
    Family.APPENDKV: "append",
    Family.DOT_DO_O: "dot_do_o",
    Family.DQ_DK_DV: "dq_dk_dv",
    Family.CONVERT_DQ: "convert_dq",
}
"""``tw::FmhaFamily`` of each family."""

_template = partial(template, __package__)


def generate(config: FmhaConfig, arch: ArchSpec, asked: FmhaConfig | None = None) -> SourceUnit:
    """The translation unit of a valid configuration, by the name of ``asked`` if that is what was completed to it.
    Raises ``ConfigInvalidError``: that there is no template of some feature is a rule as well.
    """
    RULES.require(config, arch)
    return render(config, asked) if arch.kind == "cpu" else render_gpu(config, arch, asked)


def render(config: FmhaConfig, asked: FmhaConfig | None = None) -> SourceUnit:
    """The unit of any configuration for CPUs, valid or not. ``generate`` checks first."""
    named = asked or config
    symbol, (header, macro) = symbol_of(named), portable_source(config, "cpu")
    exports, entries = f"{macro}({symbol}, Config)", {"main": symbol}
    if config.is_forward or config.family is Family.DQ_DK_DV:  # the others need no scratch memory
        exports += f"\nTW_FMHA_WORKSPACE({symbol}, Config)"
        entries["workspace"] = f"{symbol}_workspace"
    text = _template("fmha_cpu.cpp.in").substitute(
        _head(named), header=header, config=_struct(config, "cpu"), exports=exports
    )
    return SourceUnit(named.name, "c++", text, entries, plugin_version=__version__)


def render_gpu(config: FmhaConfig, arch: ArchSpec, asked: FmhaConfig | None = None) -> SourceUnit:
    """The unit of any configuration for GPUs, valid or not. ``generate`` checks first."""
    named = asked or config
    symbol, (header, macro) = symbol_of(named), pipeline_of(config, arch).source(config, arch.kind)
    text = _template("fmha_gpu.cu.in").substitute(
        _head(named), header=header, config=_struct(config, arch.kind), macro=macro, symbol=symbol
    )
    defines = {"TW_ALLOW_SPILLS": "1"} if _keeps_words(config, arch) else {}
    return SourceUnit(named.name, arch.kind, text, {"main": symbol}, defines=defines, plugin_version=__version__)


def _keeps_words(config: FmhaConfig, arch: ArchSpec) -> bool:
    """Gradients on NVIDIA GPUs, and consumers of 32 rows of latent caches, take all registers that there are: with some
    features a few words, which a block of queries or a piece of work needs once, lie in memory.
    """
    return arch.kind == "cuda" and (config.family is Family.DQ_DK_DV or (is_latent(config) and config.m0 > 16))


def product_type(config: FmhaConfig, kind: str) -> DType:
    """Element type of probabilities in the second product: the type of the queries, for which the matrix unit of a
    GPU takes 8 bits as well. CPUs round only for dot products of bf16 (``warp_tile`` has their depth) and else keep
    fp32.
    """
    if kind != "cpu":
        return config.p
    return DType.BF16 if len(config.warp_tile) > 5 and config.warp_tile[5] == 2 else DType.FP32


def _head(config: FmhaConfig) -> dict[str, str]:
    """``record`` states all fields, so that no two configurations share a unit."""
    return {"name": config.name, "record": json.dumps(config.to_dict(), sort_keys=True)}


def _struct(config: FmhaConfig, kind: str) -> str:
    return _template("fmha_config.in").substitute(_constants(config, kind)).rstrip("\n")


def _constants(config: FmhaConfig, kind: str) -> dict[str, str]:
    """Every name in the template of the structure."""
    values: dict[str, object] = {
        "q": config.q,
        "kv": config.kv,
        "o": config.o,
        "p": product_type(config, kind),
        "bias_type": config.bias_type,
        "rope_type": config.rope_type,
        "family": NATIVE_FAMILIES[config.family],
        "hdim_q": config.hdim[0],
        "hdim_v": config.hdim[1],
        # The word is a keyword of C++.
        "scheduler": "default_" if config.scheduler is Scheduling.DEFAULT else config.scheduler,
        "varlen": config.varlen,
        "v_col": config.v_layout is VLayout.VC,
        "token_sinks": config.sink,
        "skip_min": config.skip_min_seqlen_q,
        "align_q": config.hdim_align[0],
        "align_v": config.hdim_align[1],
        "team": config.team if kind == "cpu" else 1,
    }
    tile = (*config.tile, *(0,) * 9)
    for index, name in enumerate(("m0", "n0", "k0", "n1", "k1", "k0max", "tile_6", "tile_7", "tile_8")):
        values[name] = tile[index]
    triples = [f"{axis}{stage}" for stage in range(3) for axis in "mnk"]
    for prefix, numbers in (("wave", config.wave), ("warp", config.warp_tile)):
        values |= {f"{prefix}_{name}": number for name, number in zip(triples, numbers, strict=True)}
    for field in (
        "pipeline", "mask", "bias", "qscale", "rope", "kv_layout", "kv_lookup", "pad_s", "pad_sk", "pad_d", "pad_dv",
        "use_trload", "pack_gqa", "persistent", "page_size", "block_per_cu", "num_wave_groups", "stages",
        *(name for name in FLAGS if name not in ("sink", "skip_min_seqlen_q")),
    ):  # fmt: skip
        values[field] = getattr(config, field)
    return texts(values)
