"""Checks of integer operands: lengths, starts, pages. Sizes say nothing of their content, so it is looked at before
every launch
where the memory can be read; kernels guard against the same mistakes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.parse.prefix import PREFIX_OPERANDS, of_prefix
from tilewright_fmha.problem.problem import FmhaProblem, Paging
from tilewright_fmha.vocabulary import KV_APPEND, KvLookup
from tilewright_kit.requests.attributes import refuse

__all__ = ["check_values", "value_operands"]

Array = npt.NDArray[Any]
_NAMES = (
    "cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "block_table", "page_starts", "cache_index",
    *PREFIX_OPERANDS,
)  # fmt: skip


def value_operands(problem: FmhaProblem) -> tuple[str, ...]:
    """The operands that ``check_values`` looks at."""
    return tuple(name for name in _NAMES if problem.has(name))


def check_values(problem: FmhaProblem, values: Mapping[str, Array]) -> None:
    """Raise ``InvalidArgumentError`` if an operand's content points outside of what there is.

    ``values`` may lack operands whose memory cannot be read; what depends on these is not looked at.
    """
    if problem.shared is not None:
        with of_prefix():
            of = {own: values[name] for name, own in PREFIX_OPERANDS.items() if name in values}
            check_values(problem.shared.prefix, of)
    append = problem.operation == KV_APPEND
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in values:
            _check_starts(problem, values, name, append)
    if "seqlens_q" in values and not problem.varlen:
        _check_lengths("seqlens_q", values["seqlens_q"], problem.seq_q, "attributes.max_seqlen_q")
    if "cache_index" in values:
        _check_cache_index(values["cache_index"], problem.cache_items, append)
    lengths = values.get("seqlens_k")
    if lengths is None:
        return
    if problem.paged or not problem.varlen:
        _check_lengths("seqlens_k", lengths, problem.seq_k, "the room of a sequence")
    after = _check_room(problem, values, lengths) if append else lengths
    if problem.paging is not None and "block_table" in values and after is not None:
        _check_pages(problem.paging, values, lengths, after, append)


def _check_lengths(name: str, lengths: Array, room: int, what: str) -> None:
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > room):
        index = int(np.flatnonzero((lengths < 0) | (lengths > room))[0])
        raise refuse(
            f"sequence {index} has {int(lengths[index])} rows, but there is room for {room}",
            f"{name}[{index}]",
            int(lengths[index]),
            "seqlen_range",
            f"give lengths from 0 to {room}" + (f" ({what})" if what else ""),
        )


def _check_starts(problem: FmhaProblem, values: Mapping[str, Array], name: str, append: bool) -> None:
    starts, queries = values[name], name.endswith("_q")
    total = problem.total_q if queries else problem.total_k
    most = problem.new_rows if append else problem.seq_q if queries else problem.seq_k
    steps = np.diff(starts)
    if int(starts[0]) != 0 or (steps.size and int(steps.min()) < 0) or int(starts[-1]) > total:
        index = 0 if int(starts[0]) != 0 else next(iter(np.flatnonzero(steps < 0) + 1), len(starts) - 1)
        raise refuse(
            f"{name} does not go from 0 up to at most {total}, the rows that there are",
            f"{name}[{int(index)}]",
            int(starts[index]),
            "cu_seqlens_ascending",
            "give the first row of each sequence in ascending order, and the end of the last",
        )
    own = values.get("seqlens_q" if queries else "seqlens_k") if not append else None
    given = problem.has("seqlens_q" if queries else "seqlens_k") and not append
    if own is not None and own.size and (int(own.min()) < 0 or bool((own > steps).any())):
        index = int(np.flatnonzero((own < 0) | (own > steps))[0])
        raise refuse(
            f"sequence {index} has {int(own[index])} rows, but {name} leaves it room for {int(steps[index])}",
            f"seqlens_{'q' if queries else 'k'}[{index}]",
            int(own[index]),
            "seqlen_range",
            "give lengths that fit between the starts",
        )
    lengths = own if own is not None else None if given else steps
    if lengths is not None and lengths.size and int(lengths.max()) > most:
        index = int(np.argmax(lengths))
        attribute = f"max_seqlen_{'q' if queries else 'k'}"
        raise refuse(
            f"sequence {index} has {int(lengths[index])} rows, but {attribute} says {most}",
            f"{name}[{index + 1}]",
            int(lengths[index]),
            "seqlen_range",
            f"set {attribute} to at least {int(lengths[index])}",
        )


def _check_cache_index(index: Array, items: int, append: bool) -> None:
    if index.size and (int(index.min()) < 0 or int(index.max()) >= items):
        at = int(np.flatnonzero((index < 0) | (index >= items))[0])
        raise refuse(
            f"cache_index names item {int(index[at])}, but the cache has {items}",
            f"cache_index[{at}]",
            int(index[at]),
            "cache_index_range",
            f"give numbers from 0 to {items - 1}",
        )
    if append and len(set(index.tolist())) < index.size:
        at = next(i for i in range(1, index.size) if int(index[i]) in index[:i])
        raise refuse(
            f"two sequences append to item {int(index[at])} of the cache",
            f"cache_index[{at}]",
            int(index[at]),
            "cache_index_range",
            "give each sequence an item of its own",
        )


def _check_room(problem: FmhaProblem, values: Mapping[str, Array], lengths: Array) -> Array | None:
    """Lengths after appending; None if they cannot be known."""
    added: Any = problem.new_rows
    if problem.varlen:
        if "cu_seqlens_q" not in values:
            return None
        added = np.diff(values["cu_seqlens_q"])
    after: Array = lengths.astype(np.int64) + added
    if after.size and int(after.max()) > problem.seq_k:
        index = int(np.argmax(after))
        raise refuse(
            f"sequence {index} has {int(lengths[index])} rows in the cache, and with the new ones {int(after[index])}, "
            f"but there is room for {problem.seq_k}",
            f"seqlens_k[{index}]",
            int(lengths[index]),
            "cache_full",
            "give a larger cache, or more pages to a sequence",
        )
    if problem.rotary_dim and after.size and int(after.max()) > problem.rotary_rows:
        index = int(np.argmax(after))
        raise refuse(
            f"sequence {index} grows to {int(after[index])} rows, but rotary_cos has {problem.rotary_rows} positions",
            f"seqlens_k[{index}]",
            int(lengths[index]),
            "rotary_positions",
            f"give rotary tables of at least {int(after[index])} positions",
        )
    return after


# ---- pages ----


def _check_pages(paging: Paging, values: Mapping[str, Array], lengths: Array, after: Array, append: bool) -> None:
    table, size = values["block_table"], paging.page_size
    counts = -(-after // size)
    if paging.lookup is KvLookup.SGLANG:
        starts = values.get("page_starts")
        if starts is None:
            return
        first = _check_page_starts(starts, counts, len(table), append)
    else:
        first = np.arange(len(lengths)) * table.shape[1]
        table = table.reshape(-1)
    # The place in the table of every entry in use, one sequence after the other.
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    if not total:
        return
    places = np.arange(total) + np.repeat(first - (ends - counts), counts)
    used = table[places]
    if int(used.min()) < 0 or int(used.max()) >= paging.pages:
        at = int(np.flatnonzero((used < 0) | (used >= paging.pages))[0])
        _refuse_page(paging, int(used[at]), int(places[at]), int(np.searchsorted(ends, at, "right")))
    if append:
        _check_shared(paging, used, ends, counts, lengths)


def _refuse_page(paging: Paging, page: int, place: int, sequence: int) -> None:
    raise refuse(
        f"sequence {sequence} uses page {page}, but the cache has {paging.pages}",
        f"block_table[{place}]",
        page,
        "block_table_range",
        f"give pages from 0 to {paging.pages - 1} (entries beyond a sequence's length may be anything)"
        if paging.pages
        else "make a cache with pages, or say with seqlens_k that nothing is in it",
    )


def _check_page_starts(starts: Array, counts: Array, entries: int, append: bool) -> Array:
    steps = np.diff(starts)
    if int(starts[0]) < 0 or (steps.size and int(steps.min()) < 0) or int(starts[-1]) > entries:
        raise refuse(
            f"page_starts does not go up to at most {entries}, the entries of block_table",
            "page_starts",
            int(starts[-1]),
            "cu_seqlens_ascending",
            "give where each sequence begins in block_table in ascending order, and the end of the last",
        )
    if steps.size and bool((steps < counts).any()):
        index = int(np.flatnonzero(steps < counts)[0])
        raise refuse(
            f"sequence {index} needs {int(counts[index])} pages, but page_starts gives it {int(steps[index])}",
            f"page_starts[{index + 1}]",
            int(starts[index + 1]),
            "cache_full" if append else "seqlen_range",
            "give the sequence more pages, or a smaller length",
        )
    first: Array = starts[:-1]
    return first


def _check_shared(paging: Paging, used: Array, ends: Array, counts: Array, lengths: Array) -> None:
    """A page that is written to belongs to one sequence alone, and to it once."""
    fresh = counts - lengths // paging.page_size
    owners = np.bincount(used)
    if int(owners.max()) < 2:
        return
    written = np.arange(used.size) >= np.repeat(ends - fresh, counts)
    shared = written & (owners[used] > 1)
    if shared.any():
        at = int(np.flatnonzero(shared)[0])
        sequences = np.searchsorted(ends, np.flatnonzero(used == used[at]), "right")
        raise refuse(
            f"page {int(used[at])} is to be written to, but it is used more than once, by sequences "
            f"{', '.join(str(int(item)) for item in sequences[:4])}",
            "block_table",
            int(used[at]),
            "page_shared",
            "give the sequence that appends a copy of the page, as a page of its own",
        )
