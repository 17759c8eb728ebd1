"""The calls of a driver that devices make, in neutral words.

Every call answers as the drivers' Python packages do: a tuple that begins with the result, which is false for success
and has a ``name`` otherwise, followed by the values. Nothing raises because a driver refused.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Answer", "GpuApi"]

Answer = Any
"""A tuple, of which the drivers' packages say no more."""


class GpuApi(Protocol):
    """See above. Streams, events, pools and allocations are the driver's objects; addresses are plain numbers."""

    @property
    def raw(self) -> Any:
        """The driver's package."""
        ...

    def make_current(self, context: Any) -> Answer:
        """For the calling thread."""
        ...

    # Streams and events

    def new_stream(self) -> Answer:
        """One that waits for no other."""
        ...

    def end_stream(self, stream: Any) -> Answer:
        """Destroy a stream; work under way ends first, without a wait."""
        ...

    def query_stream(self, stream: Any) -> Answer: ...

    def wait_stream(self, stream: Any) -> Answer: ...

    def record_event(self, event: Any, stream: Any) -> Answer: ...

    def new_event(self, timing: bool) -> Answer: ...

    def end_event(self, event: Any) -> Answer: ...

    def query_event(self, event: Any) -> Answer: ...

    def wait_event(self, event: Any) -> Answer: ...

    def elapsed_ms(self, begin: Any, end: Any) -> Answer: ...

    def new_shared_event(self) -> Answer:
        """An event that other processes can open, and its name: 64 bytes."""
        ...

    def open_event(self, name: bytes) -> Answer:
        """An event of another process, by its name."""
        ...

    # Memory

    def fill(self, address: int, nbytes: int, stream: Any) -> Answer:
        """With zeros."""
        ...

    def copy_in(self, address: int, source: Any, nbytes: int, stream: Any) -> Answer:
        """From the host: ``source`` is a buffer or an address."""
        ...

    def copy_out(self, target: Any, address: int, nbytes: int, stream: Any) -> Answer: ...

    def lock_host(self, memory: memoryview) -> Answer: ...

    def unlock_host(self, memory: memoryview) -> Answer: ...

    def allocate(self, nbytes: int) -> Answer:
        """Address of memory that has a handle for other processes."""
        ...

    def free(self, address: int) -> Answer: ...

    def new_pool(self, ordinal: int, kept: int) -> Answer:
        """A stream-ordered pool that keeps ``kept`` bytes for reuse while nobody uses them."""
        ...

    def end_pool(self, pool: Any) -> Answer: ...

    def trim_pool(self, pool: Any) -> Answer:
        """Give back all that is not in use."""
        ...

    def pool_use(self, pool: Any) -> Answer:
        """Bytes in use, and bytes held."""
        ...

    def take(self, nbytes: int, pool: Any, stream: Any) -> Answer:
        """Address of memory of a pool, for use behind what ``stream`` has been given."""
        ...

    def give_back(self, address: int, stream: Any) -> Answer: ...

    # Memory of other processes

    def address_range(self, address: int) -> Answer:
        """Base and size of the allocation at an address."""
        ...

    def device_of(self, address: int) -> Answer:
        """Ordinal of the device that the memory lies on."""
        ...

    def export_handle(self, address: int) -> Answer:
        """The handle of an allocation: 64 bytes."""
        ...

    def open_handle(self, data: bytes) -> Answer:
        """An address in the allocation that the handle names."""
        ...

    def close_handle(self, address: int) -> Answer: ...

    def import_pool(self, fd: int) -> Answer: ...

    def allow_pool(self, pool: Any, ordinal: int) -> Answer:
        """Let the device use what comes from an imported pool."""
        ...

    def import_pointer(self, pool: Any, data: bytes) -> Answer:
        """Address of an allocation of an imported pool, which ``free`` unmaps."""
        ...

    def import_fd(self, fd: int) -> Answer:
        """A shareable allocation."""
        ...

    def describe(self, allocation: Any) -> Answer:
        """Ordinal of the device that it lies on, and the granule of its mappings in bytes."""
        ...

    def release(self, allocation: Any) -> Answer:
        """Mappings of it stay."""
        ...

    def reserve(self, nbytes: int) -> Answer:
        """A range of addresses."""
        ...

    def free_range(self, base: int, nbytes: int) -> Answer: ...

    def map_range(self, base: int, nbytes: int, allocation: Any) -> Answer:
        """The first ``nbytes`` of an allocation."""
        ...

    def unmap_range(self, base: int, nbytes: int) -> Answer: ...

    def allow_range(self, base: int, nbytes: int, ordinal: int) -> Answer:
        """Let the device read and write it."""
        ...
