"""Pages of a cache by sequence, and lengths of sequences; see ``kv_cache``. No I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tilewright.dispatch.plans.plan import PlanState
from tilewright.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from tilewright.session.state import Core
from tilewright.tensor.resident import BufferState, ResidentTensor
from tilewright.types.spec import Array, Spec

__all__ = ["INT", "CacheBase", "CacheState"]

INT = np.dtype(np.int32)


class CacheState:
    """State of a cache on this side: pages by sequence, and lengths."""

    def __init__(self, core: Core, sizes: dict[str, int], device: str | None, layout: str) -> None:
        self.core = core
        self.device = device
        self.layout = layout
        self.page_size = sizes["page_size"]
        self.pages = sizes["pages"]
        self.sequences = sizes["sequences"]
        self.max_pages = sizes["max_pages"]
        self.table: Array = np.zeros((self.sequences, self.max_pages), INT)
        self.lengths: Array = np.zeros(self.sequences, INT)
        self.used: list[int] = [0] * self.sequences
        """Pages of each sequence."""
        self.free_pages = list(range(self.pages))
        self.free_ids = list(range(self.sequences))
        self.live: set[int] = set()
        self.prefixes: dict[int, int] = {}
        """Prefix of each sequence that rests on one."""
        self.buffers: dict[str, BufferState] = {}
        self.k: ResidentTensor
        self.v: ResidentTensor
        self.factors: dict[str, ResidentTensor] = {}
        """Factors of a cache in fp8, by operand."""
        self.plans: dict[Any, PlanState] = {}
        self.fresh: list[PlanState] = []
        """Plans that the call under way has made."""
        self.scratch: dict[Any, ResidentTensor] = {}
        """Rotated queries on their way from one stage to the next."""
        self.changed: set[int] = set()
        """Sequences whose row of the table is not on the device yet."""
        self.stale = True
        """True if the lengths on the device are older than these."""
        self.closed = False

    def add(self, prefix: Any = None) -> int:
        """An empty sequence's id, behind the tokens of ``prefix``. Raises ``ResourceExhaustedError``."""
        self.check_open()
        before = None if prefix is None else self.known(prefix)[0]
        if before in self.prefixes:
            raise InvalidArgumentError(
                f"sequence {before} rests on a prefix itself",
                field="prefix",
                value=before,
                rule="cache_prefix",
                fix="name a sequence that was added without a prefix",
            )
        if not self.free_ids:
            raise ResourceExhaustedError(
                f"the cache has {self.sequences} sequences already",
                field="sequences",
                value=self.sequences,
                rule="cache_sequences",
                fix="free one, or make a cache for more",
            )
        found = heapq.heappop(self.free_ids)
        self.live.add(found)
        if before is not None:
            self.prefixes[found] = before
        if self.lengths[found]:
            self.lengths[found], self.stale = 0, True
        return found

    def check_open(self) -> None:
        if self.closed:
            raise InvalidArgumentError("the cache is closed", field="cache", rule="cache_open", fix="make another")

    def known(self, ids: Any) -> list[int]:
        """``ids`` as distinct numbers of live sequences."""
        self.check_open()
        plain = ids.tolist() if isinstance(ids, np.ndarray) else ids
        given = list(plain) if isinstance(plain, Iterable) and not isinstance(plain, str) else [plain]
        for place, item in enumerate(given):
            if isinstance(item, bool) or not isinstance(item, (int, np.integer)) or int(item) not in self.live:
                raise NotFoundError(
                    "the cache has no such sequence",
                    field=f"ids[{place}]",
                    value=item,
                    rule="cache_sequence",
                    fix="use ids that add() gave and free() did not take back",
                )
        found = [int(item) for item in given]
        if len(set(found)) < len(found):
            raise InvalidArgumentError(
                "a sequence is named twice", field="ids", value=found, rule="cache_sequence", fix="name each once"
            )
        return found

    def reserve(self, ids: Sequence[int], rows: Sequence[int]) -> None:
        """Pages for so many more tokens of each sequence: all of them or none. Raises ``ResourceExhaustedError``, and
        ``InvalidArgumentError`` for one that others rest on.
        """
        self._check_free([item for item, count in zip(ids, rows, strict=True) if count], "is to grow")
        need = [
            max(-(-(int(self.lengths[item]) + count) // self.page_size) - self.used[item], 0)
            for item, count in zip(ids, rows, strict=True)
        ]
        for item, count in zip(ids, need, strict=True):
            if self.used[item] + count > self.max_pages:
                raise ResourceExhaustedError(
                    f"sequence {item} would need {self.used[item] + count} pages of {self.page_size} tokens",
                    field="max_pages",
                    value=self.max_pages,
                    rule="cache_full",
                    fix="make a cache with a larger max_pages",
                )
        if sum(need) > len(self.free_pages):
            raise ResourceExhaustedError(
                f"{sum(need)} more pages are needed, and {len(self.free_pages)} of {self.pages} are free",
                field="pages",
                value=self.pages,
                rule="cache_full",
                fix="free sequences, or make a cache with more pages",
            )
        for item, count in zip(ids, need, strict=True):
            for _ in range(count):
                self.table[item, self.used[item]] = heapq.heappop(self.free_pages)
                self.used[item] += 1
                self.changed.add(item)

    def tables(self, ids: Sequence[int]) -> tuple[Any, Any, bool]:
        """Table and lengths of these sequences: as they lie on the device if they are neighbours there, else copies."""
        first = ids[0] if ids else 0
        if list(ids) == list(range(first, first + len(ids))):
            table, lengths = (self.buffers[name] for name in ("block_table", "lengths"))
            width = self.max_pages
            return (
                ResidentTensor(table, Spec((len(ids), width), INT), first * width * 4),
                ResidentTensor(lengths, Spec((len(ids),), INT), first * 4),
                True,
            )
        return self.table[list(ids)], self.lengths[list(ids)], False

    def free(self, ids: Any) -> None:
        """Give sequences' pages back; their ids may be given out again."""
        known = self.known(ids)
        self._check_free(known, "is to end", known)
        for item in known:
            self.prefixes.pop(item, None)
            for place in range(self.used[item]):
                heapq.heappush(self.free_pages, int(self.table[item, place]))
            self.used[item] = 0
            self.live.discard(item)
            self.lengths[item], self.stale = 0, True
            heapq.heappush(self.free_ids, item)

    def _check_free(self, ids: Sequence[int], what: str, but: Sequence[int] = ()) -> None:
        """No other sequence rests on these, except those of ``but``."""
        for item, prefix in self.prefixes.items():
            if prefix in ids and item not in but:
                raise InvalidArgumentError(
                    f"sequence {prefix} {what}, but it is the prefix of sequence {item}",
                    field="ids",
                    value=prefix,
                    rule="cache_prefix",
                    fix=f"free sequence {item} and all others that rest on {prefix} first, or with it",
                )

    def close(self) -> None:
        """Free all that the server keeps for the cache with the next call. Idempotent."""
        self.closed = True
        for plan in self.plans.values():
            plan.close()
        for tensor in self.scratch.values():
            tensor.close()
        for buffer in self.buffers.values():
            buffer.release()
        self.plans.clear()
        self.scratch.clear()


class CacheBase:
    """Parts of a cache that need no I/O."""

    def __init__(self, client: Any, state: CacheState) -> None:
        self._client = client
        self._subject = state

    def add(self, *, prefix: Any = None) -> int:
        """Begin an empty sequence; returns its id. Raises ``ResourceExhaustedError`` if there are as many as can be.

        With ``prefix``, the id of another sequence, it begins behind that one's tokens, whose pages it shares. The
        other one stays as it is until all that rest on it have ended. ``attend`` reads a prefix once for all
        sequences that are neighbours in its ``ids`` and share it.
        """
        return self._subject.add(prefix)

    def free(self, ids: Any) -> None:
        """End sequences (an id or several): their pages are given to others."""
        self._subject.free(ids)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every sequence, by id; those of its prefix included."""
        own, prefixes = self._subject.lengths, self._subject.prefixes
        return {
            item: int(own[item]) + (int(own[prefixes[item]]) if item in prefixes else 0)
            for item in sorted(self._subject.live)
        }

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._subject.free_pages)

    @property
    def tables(self) -> tuple[ResidentTensor, ResidentTensor, ResidentTensor, ResidentTensor]:
        """Keys, values, block table and lengths where they lie, as operands for other calls."""
        state = self._subject
        table = ResidentTensor(state.buffers["block_table"], Spec(state.table.shape, INT))
        return state.k, state.v, table, ResidentTensor(state.buffers["lengths"], Spec(state.lengths.shape, INT))

    def close(self) -> None:
        """Free the cache with the next call to the server. Also happens when the last reference goes. Idempotent."""
        self._subject.close()

    def __repr__(self) -> str:
        state = self._subject
        pages = f"{state.pages - len(state.free_pages)} of {state.pages} pages of {state.page_size} tokens in use"
        return f"<{type(self).__name__}: {pages}, {len(state.live)} sequences>"
