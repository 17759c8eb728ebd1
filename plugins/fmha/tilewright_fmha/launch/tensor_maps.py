"""Specialised kernels in plans: tensor maps for the copy engine, and which problems it cannot reach.

The kernel's parameter is ``tw_fmha_ws_params`` of ``tilewright/core/args/fmha.h``: four maps, then the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.problem.problem import FmhaProblem, Strides
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.plan import Struct, TensorMap

__all__ = ["copy_mismatches", "with_maps"]

_UNIT = 16
"""Bytes; ``cuTensorMapEncodeTiled``: addresses and strides are multiples of it."""
_LARGEST_STRIDE = 2**40
_LINE = 128
"""Bytes of a box's rows, over which it is swizzled, where heads are not shorter."""
_LEAST_PAGE = 8
"""Rows over which the pattern of the swizzle goes."""
_LEAST_SCALE = 1e-30
"""Less would be zero, or nearly, in fp32."""
_STORED_ROWS = 64
"""Rows that one consumer stores."""


def with_maps(problem: FmhaProblem, config: FmhaConfig, args: Struct) -> Struct:
    """The kernel's parameter: maps of q, k, v and o, of gradients do, before the arguments."""
    keys = min(problem.paging.page_size, config.n0) if problem.paging is not None else config.n0
    last = {"do": config.m0} if config.family is Family.DQ_DK_DV else {"o": _STORED_ROWS}
    rows = {"q": config.m0, "k": keys, "v": keys, **last}
    lines = {"k": config.hdim[0] * config.kv.bytes, "v": config.hdim[1] * config.kv.bytes}
    few = decodes(config)
    maps = [_map(problem, name, count, lines.get(name, _LINE), few) for name, count in rows.items()]
    if splits_tiles(config) and config.pack_gqa:
        maps[0] = _packed_queries(problem, config)
    return Struct((*maps, args))


def _packed_queries(problem: FmhaProblem, config: FmhaConfig) -> TensorMap:
    """Queries as elements, heads of a key head, rows of all items, key heads: a tile has all heads of some rows."""
    place, group, size = problem.place("q"), problem.group, problem.operand("q").desc.dtype.bytes
    rows = problem.total_q if problem.varlen else problem.batch * problem.seq_q
    # Of one item the rows may lie anyhow; of one row each, items are the rows.
    apart = place.row if problem.varlen or problem.batch == 1 or problem.seq_q > 1 else place.batch
    sizes, smallest = (problem.hdim_q, group, rows, problem.heads_k), problem.hdim_q * size
    steps = zip(sizes[1:], (place.head, apart, place.head * group), strict=True)
    strides = tuple(step * size if count > 1 else smallest for count, step in steps)
    dtype, box = problem.operand("q").desc.dtype.value, (_LINE // size, group, config.m0 // group, 1)
    return TensorMap(problem.source("q"), 0, dtype, sizes, strides, box, _LINE, 2 * _LINE)


def _sizes(problem: FmhaProblem, name: str) -> tuple[int, int, int, int]:
    """Elements of a head, rows, heads, batch items. Of a cache in pages: those of a page, and pages."""
    hdim = problem.hdim_v if name in ("v", "o", "do", "dv") else problem.hdim_q
    if name in ("k", "v") and problem.paging is not None:
        return hdim, problem.paging.page_size, problem.heads_k, problem.paging.pages
    if name in ("q", "o", "do"):
        rows, heads, items = problem.seq_q, problem.heads_q, problem.batch
        total = problem.total_q
    else:
        rows, heads, items = problem.seq_k, problem.heads_k, problem.cache_items
        total = problem.total_k
    return (hdim, total, heads, 1) if problem.varlen else (hdim, rows, heads, items)


def _steps(place: Strides) -> tuple[int, int, int]:
    return (place.row, place.head, place.batch)


def _map(problem: FmhaProblem, name: str, rows: int, line: int, few: bool) -> TensorMap:
    """``line``: bytes of the kernel's heads. ``few``: of a kernel for few rows, which memory binds: two lines at a time
    cost it 5 to 7 % of the rate of memory (H200).
    """
    sizes, size = _sizes(problem, name), problem.operand(name).desc.dtype.bytes
    # What has one element along an axis may claim any stride there: it gets one that the engine takes.
    smallest = sizes[0] * size
    strides = tuple(
        step * size if count > 1 else smallest
        for count, step in zip(sizes[1:], _steps(problem.place(name)), strict=True)
    )
    line = min(line, _LINE)
    fetch = _LINE if few else 2 * _LINE
    dtype = problem.operand(name).desc.dtype.value
    return TensorMap(problem.source(name), 0, dtype, sizes, strides, (line // size, rows, 1, 1), line, fetch)


def copy_mismatches(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    """Reasons that keep the copy engine, or how maxima are found, from a problem that the kernel's features would
    suit."""
    if problem.alignment < _UNIT:
        reason = f"operands lie at multiples of {problem.alignment} bytes; the kernel needs {_UNIT}"
        yield Violation("alignment", "pipeline", config.pipeline, reason)
    if problem.scale < _LEAST_SCALE:
        reason = f"it compares scores before they are scaled, by what fp32 must hold above zero, not {problem.scale:g}"
        yield Violation("positive_scale", "pipeline", config.pipeline, reason)
    rows = problem.seq_k if problem.paging is not None else min(problem.seq_k, problem.total_k)
    gradients = config.family is Family.DQ_DK_DV
    if not problem.is_empty and rows == 0:
        yield Violation("empty_keys", "pipeline", config.pipeline, "there is nothing to copy where there are no keys")
        return
    if not problem.is_empty and gradients and problem.seq_q == 0:
        reason = "there is nothing to copy where there are no queries"
        yield Violation("empty_queries", "pipeline", config.pipeline, reason)
        return
    if problem.paging is not None and problem.paging.page_size < _LEAST_PAGE:
        reason = f"it copies at least {_LEAST_PAGE} rows at a time, and pages have {problem.paging.page_size}"
        yield Violation("page_rows", "pipeline", config.pipeline, reason)
    for name in ("q", "k", "v", "do", "dk", "dv") if gradients else ("q", "k", "v", "o"):
        if fault := _fault(problem, name):
            yield Violation("copy_strides", "pipeline", config.pipeline, f"{name}: {fault}")


def _fault(problem: FmhaProblem, name: str) -> str:
    """Why the copy engine cannot reach an operand; empty if it can."""
    place, size = problem.place(name), problem.operand(name).desc.dtype.bytes
    sizes = _sizes(problem, name)
    if place.col != 1 and sizes[0] > 1:
        return "elements of a head are not neighbours"
    if sizes[0] * size % _UNIT:
        return f"a head has {sizes[0] * size} bytes, not a multiple of {_UNIT}"
    for what, count, step in zip(("rows", "heads", "items"), sizes[1:], _steps(place), strict=True):
        apart = step * size
        if count > 1 and (apart <= 0 or apart % _UNIT or apart >= _LARGEST_STRIDE):
            return f"its {what} are {apart} bytes apart, not a positive multiple of {_UNIT}"
    return ""
