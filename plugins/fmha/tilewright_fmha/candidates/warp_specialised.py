"""Warp-specialised kernels: their cuts, those for a problem, and problems that they cannot compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decode_algorithms, decode_heads, splits_tiles
from tilewright_fmha.config.features import features_of
from tilewright_fmha.config.gradients import GRADIENT_HEADS, gradient_algorithm, gradient_heads
from tilewright_fmha.config.latent import LATENT_HEADS, is_latent, latent_algorithms
from tilewright_fmha.config.warp_specialised import HEADS, parts_algorithm, specialised_algorithms, specialised_heads
from tilewright_fmha.launch.tensor_maps import copy_mismatches
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Violation

__all__ = ["ws_algorithms", "ws_cuts", "ws_mismatches"]

_FEW_ROWS = 16
"""Rows of a key head up to which memory binds kernels for few rows: those of 32 read keys at 0.4 of its rate (H200)."""
_MOST_CAP = 1000.0
"""Largest soft cap of scores in Hopper's own kernels, whose hyperbolic tangents are right to 2^-22 of 1."""


def ws_cuts(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:  # noqa: ARG001
    """Every cut for the heads of a signature."""
    if config.family is Family.DQ_DK_DV:
        yield from (gradient_algorithm(config.hdim) for _ in range(config.hdim in GRADIENT_HEADS))
        return
    if config.family is not Family.SPLITKV:
        yield from specialised_algorithms(config.hdim)
    elif config.hdim == LATENT_HEADS:
        yield from latent_algorithms()
    else:
        yield from decode_algorithms(config.hdim, config.dtype)
        if config.hdim in HEADS:
            yield parts_algorithm(config.hdim)


def ws_algorithms(problem: FmhaProblem, plain: FmhaConfig) -> Iterator[FmhaConfig]:
    """Kernels for a problem, by its signature ``plain``. They hold heads of a few sizes, into which the copy
    engine pads others.
    """
    proposed = {Family.SPLITKV: _few_rows, Family.DQ_DK_DV: _gradients}
    yield from proposed.get(plain.family, _forward)(problem, plain)


def _gradients(problem: FmhaProblem, plain: FmhaConfig) -> Iterator[FmhaConfig]:
    hdim = gradient_heads(problem.hdim_q, problem.hdim_v)
    if hdim is not None:
        yield plain.replace(hdim=hdim, **gradient_algorithm(hdim))


def _forward(problem: FmhaProblem, plain: FmhaConfig) -> Iterator[FmhaConfig]:
    """Only an explicit request has one consumer with features, or bits that tell of wrong lengths, which no GPU has
    tried.
    """
    hdim = specialised_heads(problem.hdim_q, problem.hdim_v)
    if hdim is None or problem.status:
        return
    bare = features_of(plain) <= {"bf16", "causal"}
    for item in specialised_algorithms(hdim):
        if bare or item["wave"][0] > 1:
            yield plain.replace(hdim=hdim, **item)


def _few_rows(problem: FmhaProblem, plain: FmhaConfig) -> Iterator[FmhaConfig]:
    """The kernel of the fewest rows that hold all query heads of a key head, and that of many rows where several tiles
    would each read all keys.
    """
    hdim = decode_heads(problem.dtype, problem.hdim_q, problem.hdim_v)
    if hdim is not None:
        cuts = decode_algorithms(hdim, problem.dtype)
    elif problem.v_in_k and problem.hdim_q <= LATENT_HEADS[0] and problem.hdim_v <= LATENT_HEADS[1]:
        hdim, cuts = LATENT_HEADS, latent_algorithms()
    else:
        return
    found = [plain.replace(hdim=hdim, **item) for item in cuts]
    rows = problem.seq_q * problem.group
    yield next((item for item in found if item.m0 >= rows), found[-1])
    if rows > _FEW_ROWS and hdim in HEADS:
        yield plain.replace(hdim=hdim, **parts_algorithm(hdim))


def ws_mismatches(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    """Reasons why a warp-specialised kernel cannot compute a problem that its features would suit."""
    if problem.softcap > _MOST_CAP:
        reason = f"it bends scores to seven digits of the cap, which at {problem.softcap:g} are too few of the scores"
        yield Violation("softcap_digits", "pipeline", config.pipeline, reason)
    if config.family is Family.DQ_DK_DV and (problem.has("seqlens_q") or problem.has("seqlens_k")):
        reason = "what lies beyond an item's length takes part in its products, times zero, and may be no number"
        yield Violation("lengths", "pipeline", config.pipeline, reason)
    if is_latent(config) and not problem.v_in_k:
        reason = "its values are the first elements of keys, and the problem has values of their own"
        yield Violation("latent_values", "hdim", config.hdim, reason)
    if splits_tiles(config) and config.pack_gqa:
        yield from _packed(problem, config)
    yield from copy_mismatches(problem, config)


def _packed(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    """Reasons why the copy engine cannot gather the query heads of a key head as rows of one tile."""
    if config.m0 % problem.group:
        reason = f"a tile has {config.m0} rows, which {problem.group} query heads of a key head do not divide"
        yield Violation("copy_strides", "pack_gqa", True, reason, {"pack_gqa": False})
    place = problem.place("q")
    if not problem.varlen and min(problem.batch, problem.seq_q) > 1 and place.batch != problem.seq_q * place.row:
        reason = "q: rows of items do not follow each other"
        yield Violation("copy_strides", "pack_gqa", True, reason, {"pack_gqa": False})
