"""Kernels of AMD GPUs whose keys go straight to LDS: their cut, and problems that they cannot compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.pipelines import direct_algorithm
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Violation

__all__ = ["direct_cuts", "direct_mismatches"]

_UNIT = 16
"""Bytes of a copy, of which rows are multiples."""
_SPAN = 1 << 31
"""Bytes that a block of keys, and all queries of a head, may span: buffers count them in 32 bits."""


def direct_cuts(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:  # noqa: ARG001
    """The cut for heads of that size, if there is one."""
    cut = direct_algorithm(config.family, config.hdim)
    yield from (cut,) if cut else ()


def direct_mismatches(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    """Reasons why the kernel cannot compute a problem that its features would suit."""
    heads = (problem.hdim_q, problem.hdim_v)
    if heads != config.hdim:
        reason = f"it has heads of just {config.hdim}, and the problem heads of {heads}"
        yield Violation("direct_heads", "hdim", config.hdim, reason)
    if problem.alignment < _UNIT:
        reason = f"operands lie at multiples of {problem.alignment} bytes; the kernel needs {_UNIT}"
        yield Violation("alignment", "pipeline", config.pipeline, reason)
    gradients = config.family is Family.DQ_DK_DV
    for name in ("q", "k", "v", "do") if gradients else ("k", "v"):
        place, size = problem.place(name), problem.operand(name).desc.dtype.bytes
        row = place.row * size
        if place.col != 1:
            reason = f"{name}: elements of a head are no neighbours"
            yield Violation("copy_strides", "pipeline", config.pipeline, reason)
        steps = [step * size for step in (place.row, place.head, place.batch)]
        rows = problem.seq_q if name in ("q", "do") else config.n0
        if row < 0 or row * rows >= _SPAN or any(step % _UNIT for step in steps):
            reason = f"{name}: rows, heads and items are {steps} bytes apart, not all multiples of {_UNIT}"
            yield Violation("copy_strides", "pipeline", config.pipeline, reason)
