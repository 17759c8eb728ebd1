"""Prefixes that sequences of a cache share: which of them rest on which, and the operands of a step over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.operations.attention.kv_pages import INT, CacheState
from tilewright.tensor.resident import ResidentTensor
from tilewright.types.spec import Spec

__all__ = ["behind_prefixes", "power_of_two", "prefix_operands"]


def prefix_operands(
    state: CacheState, ids: Sequence[int], rows: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands and attributes of attention of sequences that rest on prefixes; none if no sequence does. Neighbours in
    ``ids`` with one prefix are a group, whose prefix is read once.
    """
    if not any(item in state.prefixes for item in ids):
        return {}, {}
    counted = zip(ids, rows, strict=True)
    groups = [
        (prefix, sum(count for _, count in members))
        for prefix, members in groupby(counted, lambda pair: state.prefixes.get(pair[0]))
    ]
    # Few shapes, so that few plans are made: further groups are empty.
    count = power_of_two(len(groups))
    width = power_of_two(max(state.used[prefix] for prefix, _ in groups if prefix is not None))
    table, lengths = np.zeros((count, min(width, state.max_pages)), INT), np.zeros(count, INT)
    starts = np.zeros(count + 1, INT)
    for place, (prefix, total) in enumerate(groups):
        starts[place + 1 :] = starts[place] + total
        if prefix is not None:
            used = state.used[prefix]
            table[place, :used] = state.table[prefix, :used]
            lengths[place] = state.lengths[prefix]
    found = {"prefix_table": table, "prefix_seqlens": lengths}
    if len(groups) == 1:
        return found, {}
    return {**found, "prefix_starts": starts}, {"max_prefix_rows": power_of_two(max(total for _, total in groups))}


def behind_prefixes(state: CacheState, ids: Sequence[int], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary tables whose first position is that behind the prefixes of these sequences. Raises
    ``InvalidArgumentError`` for prefixes of several lengths.
    """
    if rope["rotary_cos"] is None and rope["rotary_sin"] is None:
        return dict(rope)
    lengths = {int(state.lengths[state.prefixes[item]]) if item in state.prefixes else 0 for item in ids}
    if len(lengths) > 1:
        raise InvalidArgumentError(
            "rows behind prefixes of different lengths are rotated by different positions",
            field="ids",
            value=sorted(lengths),
            rule="rotary_positions",
            fix="name sequences whose prefixes are equally long, or give rows that are rotated already",
        )
    first = max(lengths, default=0)
    tables = {name: _from(rope[name], first) for name in ("rotary_cos", "rotary_sin")} if first else {}
    return {**rope, **tables}


def _from(table: Any, first: int) -> Any:
    """A table without its first rows."""
    if isinstance(table, ResidentTensor):
        rows, columns = table.shape
        skipped = min(first, rows)
        spec = Spec.of((rows - skipped, columns), table.dtype)
        return ResidentTensor(table._state, spec, table.offset + skipped * columns * table.dtype.itemsize)
    return (table if hasattr(table, "shape") or table is None else np.asarray(table))[first:]


def power_of_two(number: int) -> int:
    """The next one that is not below."""
    return 1 << max(number - 1, 0).bit_length()
