"""Heads larger than those of any kernel of a GPU: scores come from a stage of their own, which takes heads of any size,
as a bias of what follows: attention whose queries and keys count nothing, once for each part of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright_fmha.config.heads import GPU_MOST_HDIM
from tilewright_fmha.problem.problem import VECTOR, FmhaProblem
from tilewright_fmha.vocabulary import ATTENTION, BiasKind, KvLayout, QScale
from tilewright_kit.types.dtypes import DType

__all__ = ["PART_SIZES", "is_wide", "refused_parts", "value_parts"]

PART_SIZES = (GPU_MOST_HDIM, 128, 64)
"""Elements of parts of values, the preferred first: not every GPU has kernels of the largest heads in every type."""


def is_wide(problem: FmhaProblem) -> bool:
    """A problem with such heads that can be computed so."""
    return max(problem.hdim_q, problem.hdim_v) > GPU_MOST_HDIM and not refused_parts(problem)


def refused_parts(problem: FmhaProblem) -> str:
    """Why a problem with such heads is not computed part by part; empty if it is."""
    refused = {
        "no gradients": problem.operation != ATTENTION,
        "no values that are not whole vectors of 8 elements": problem.hdim_v % VECTOR != 0,
        "no pages of vectorised keys": problem.paging is not None and problem.paging.layout is not KvLayout.LINEAR,
        "no operands of 8 bits": problem.qscale is not QScale.NONE or problem.dtype.kv.bytes == 1,
        "no keys in several parts": problem.num_splits > 1,
    }
    what = next((text for text, true in refused.items() if true), "")
    return f"GPUs compute {what} where heads have more than {GPU_MOST_HDIM} elements" if what else ""


def value_parts(problem: FmhaProblem, size: int) -> Iterator[tuple[int, FmhaProblem]]:
    """First element of each part of the values, of up to ``size`` elements, and the problem that is left for it. All
    scores but for the mask are its bias, in fp32, of every item and head.
    """
    plain = replace(
        problem,
        hdim_q=min(problem.hdim_q, VECTOR),
        bias=BiasKind.ELEMENTWISE,
        dtype_bias=DType.FP32,
        open_bias=True,
        scale=0.0,
        softcap=0.0,
    )
    for first in range(0, problem.hdim_v, size):
        yield first, replace(plain, hdim_v=min(problem.hdim_v - first, size))
