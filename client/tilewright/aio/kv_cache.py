"""A cache of keys and values, for the asyncio client."""

from __future__ import annotations

from typing import Any, TypeVar

from tilewright.operations.attention import kv_cache
from tilewright.operations.attention.kv_pages import CacheBase
from tilewright.transport.drive import awaiting
from tilewright.transport.rpc import Flow

__all__ = ["KVCache"]

T = TypeVar("T")


class KVCache(CacheBase):
    """See ``tilewright.KVCache``; ``append`` and ``attend`` are awaitable."""

    async def _drive(self, flow: Flow[T]) -> T:
        result: T = await self._client._drive(flow)
        return result

    append = awaiting(kv_cache.append)
    attend = awaiting(kv_cache.attend)

    async def __aenter__(self) -> KVCache:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
