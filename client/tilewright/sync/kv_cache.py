"""A cache of keys and values, for the blocking client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tilewright.operations.attention import kv_cache
from tilewright.operations.attention.kv_pages import CacheBase
from tilewright.transport.drive import blocking
from tilewright.transport.rpc import Flow

__all__ = ["KVCache"]

P = ParamSpec("P")
T = TypeVar("T")


class KVCache(CacheBase):
    """Keys and values of many sequences in pages that the server keeps; made by ``Client.kv_cache``. A context manager
    that frees it. For one thread at a time.
    """

    def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._client._drive(flow, *args, **kwargs)
        return result

    append = blocking(kv_cache.append)
    attend = blocking(kv_cache.attend)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
