"""Kernels that only take part in plans: what combines parts, and what comes before and after gradients."""

from __future__ import annotations

from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import AttentionConfig, FmhaConfig
from tilewright_fmha.config.defaults import elementwise_algorithm
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.signature import bias_type
from tilewright_fmha.vocabulary import BiasKind, Family, KvLookup

__all__ = ["combine_of", "convert_of", "dot_of", "merge_of", "scores_of"]


def combine_of(config: FmhaConfig, arch: ArchSpec) -> FmhaConfig:
    """Kernel that adds up the parts of a split kernel."""
    return _auxiliary(config, arch, Family.COMBINE, "lse", "learned_sinks", "skip_min_seqlen_q")


def scores_of(problem: FmhaProblem, config: FmhaConfig, arch: ArchSpec) -> FmhaConfig:
    """Kernel that writes scores to memory, for the kernel ``config`` of the same plan. Its heads have any size."""
    paging = problem.paging
    kernel = AttentionConfig(
        family=Family.SCORES,
        dtype=config.dtype,
        mode=config.mode,
        bias=problem.bias if problem.bias is BiasKind.ELEMENTWISE else BiasKind.NONE,
        dtype_bias=bias_type(problem),
        paged=paging is not None,
        kv_lookup=paging.lookup if paging else KvLookup.VLLM,
    )
    return kernel.replace(**elementwise_algorithm(kernel, arch, config.team))


def merge_of(config: FmhaConfig, arch: ArchSpec) -> FmhaConfig:
    """Kernel that puts attention over a shared prefix together with that of ``config`` over the rest."""
    return _auxiliary(config, arch, Family.MERGE, "skip_min_seqlen_q")


def dot_of(config: FmhaConfig, arch: ArchSpec) -> FmhaConfig:
    """Kernel that prepares the gradients: a number for each row, and zeros where they add up."""
    return _auxiliary(config, arch, Family.DOT_DO_O, "learned_sinks", *_gradient_fields(config))


def convert_of(config: FmhaConfig, arch: ArchSpec) -> FmhaConfig:
    """Kernel that converts the accumulated gradients of queries and of a bias."""
    return _auxiliary(config, arch, Family.CONVERT_DQ, *_gradient_fields(config))


def _gradient_fields(config: FmhaConfig) -> tuple[str, ...]:
    """A bias matters to these only if it has a gradient."""
    bias = ("bias", "dtype_bias", "dbias") if config.dbias else ()
    return ("skip_min_seqlen_q", "deterministic", *bias)


def _auxiliary(config: FmhaConfig, arch: ArchSpec, family: Family, *names: str) -> FmhaConfig:
    shared: dict[str, Any] = {name: getattr(config, name) for name in ("dtype", "mode", "hdim", *names)}
    kernel = type(config)(family=family, **shared)
    return kernel.replace(**elementwise_algorithm(kernel, arch, config.team))
