"""The asyncio client: the same methods as the blocking one, awaitable.

    >>> async with connect() as client:  # doctest: +SKIP
    ...     c = await client.gemm(a, b)

A client belongs to the event loop that it was opened in, and to the process: a forked child makes its own.
"""

from tilewright.aio.client import Buffer, Client, Kernels, connect
from tilewright.aio.kv_cache import KVCache
from tilewright.aio.plan import Bound, Plan, Stream

__all__ = ["Bound", "Buffer", "Client", "KVCache", "Kernels", "Plan", "Stream", "connect"]
