"""A cache of keys and values, for the asyncio client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tilewright.operations.attention import kv_cache
from tilewright.operations.attention.kv_pages import CacheBase
from tilewright.transport.drive import awaiting
from tilewright.transport.rpc import Flow

__all__ = ["KVCache"]

P = ParamSpec("P")
T = TypeVar("T")


class KVCache(CacheBase):
    """See ``tilewright.KVCache``; ``append`` and ``attend`` are awaitable."""

    async def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._client._drive(flow, *args, **kwargs)
        return result

    append = awaiting(kv_cache.append)
    attend = awaiting(kv_cache.attend)

    async def __aenter__(self) -> KVCache:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
