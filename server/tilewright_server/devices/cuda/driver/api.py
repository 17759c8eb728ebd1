"""``GpuApi`` over ``cuda.bindings.driver``. Functions are looked up when they are called."""

from __future__ import annotations

from typing import Any

from tilewright_server.devices.gpu.api import Answer

__all__ = ["CudaApi"]


class CudaApi:
    """See ``GpuApi``."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def make_current(self, context: Any) -> Answer:
        return self.raw.cuCtxSetCurrent(context)

    # Streams and events

    def new_stream(self) -> Answer:
        return self.raw.cuStreamCreate(self.raw.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def end_stream(self, stream: Any) -> Answer:
        return self.raw.cuStreamDestroy(stream)

    def query_stream(self, stream: Any) -> Answer:
        return self.raw.cuStreamQuery(stream)

    def wait_stream(self, stream: Any) -> Answer:
        return self.raw.cuStreamSynchronize(stream)

    def record_event(self, event: Any, stream: Any) -> Answer:
        return self.raw.cuEventRecord(event, stream)

    def new_event(self, timing: bool) -> Answer:
        flags = self.raw.CUevent_flags
        return self.raw.cuEventCreate((flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING).value)

    def end_event(self, event: Any) -> Answer:
        return self.raw.cuEventDestroy(event)

    def query_event(self, event: Any) -> Answer:
        return self.raw.cuEventQuery(event)

    def wait_event(self, event: Any) -> Answer:
        return self.raw.cuEventSynchronize(event)

    def elapsed_ms(self, begin: Any, end: Any) -> Answer:
        """The driver's resolution is half a microsecond."""
        return self.raw.cuEventElapsedTime(begin, end)

    def new_shared_event(self) -> Answer:
        raw = self.raw
        flags = raw.CUevent_flags.CU_EVENT_INTERPROCESS.value | raw.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        result, event = raw.cuEventCreate(flags)
        if result:
            return result, None, b""
        result, name = raw.cuIpcGetEventHandle(event)
        if result:
            raw.cuEventDestroy(event)
            return result, None, b""
        return result, event, bytes(name.reserved)

    def open_event(self, name: bytes) -> Answer:
        handle = self.raw.CUipcEventHandle()
        handle.reserved = name
        return self.raw.cuIpcOpenEventHandle(handle)

    # Memory

    def fill(self, address: int, nbytes: int, stream: Any) -> Answer:
        return self.raw.cuMemsetD8Async(address, 0, nbytes, stream)

    def copy_in(self, address: int, source: Any, nbytes: int, stream: Any) -> Answer:
        return self.raw.cuMemcpyHtoDAsync(address, source, nbytes, stream)

    def copy_out(self, target: Any, address: int, nbytes: int, stream: Any) -> Answer:
        return self.raw.cuMemcpyDtoHAsync(target, address, nbytes, stream)

    def lock_host(self, memory: memoryview) -> Answer:
        return self.raw.cuMemHostRegister(memory, memory.nbytes, 0)

    def unlock_host(self, memory: memoryview) -> Answer:
        return self.raw.cuMemHostUnregister(memory)

    def allocate(self, nbytes: int) -> Answer:
        return self.raw.cuMemAlloc(nbytes)

    def free(self, address: int) -> Answer:
        return self.raw.cuMemFree(address)

    def new_pool(self, ordinal: int, kept: int) -> Answer:
        raw = self.raw
        properties = raw.CUmemPoolProps()
        properties.allocType = raw.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = raw.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        properties.location = self._location(ordinal)
        result, pool = raw.cuMemPoolCreate(properties)
        if result:
            return result, None
        threshold = raw.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        return raw.cuMemPoolSetAttribute(pool, threshold, raw.cuuint64_t(kept))[0], pool

    def end_pool(self, pool: Any) -> Answer:
        return self.raw.cuMemPoolDestroy(pool)

    def trim_pool(self, pool: Any) -> Answer:
        return self.raw.cuMemPoolTrimTo(pool, 0)

    def pool_use(self, pool: Any) -> Answer:
        attribute = self.raw.CUmemPool_attribute
        result, used = self.raw.cuMemPoolGetAttribute(pool, attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        if result:
            return result, 0, 0
        result, held = self.raw.cuMemPoolGetAttribute(pool, attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        return (result, 0, 0) if result else (result, int(used), int(held))

    def take(self, nbytes: int, pool: Any, stream: Any) -> Answer:
        return self.raw.cuMemAllocFromPoolAsync(nbytes, pool, stream)

    def give_back(self, address: int, stream: Any) -> Answer:
        return self.raw.cuMemFreeAsync(address, stream)

    # Memory of other processes

    def address_range(self, address: int) -> Answer:
        raw = self.raw
        answer = raw.cuMemGetAddressRange(address)
        if not answer[0]:
            return answer[0], int(answer[1]), int(answer[2])
        attribute = raw.CUpointer_attribute  # older drivers tell the ranges of pools only so
        result, start = raw.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)
        if result:
            return result, 0, 0
        result, size = raw.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)
        return (result, 0, 0) if result else (result, int(start), int(size))

    def device_of(self, address: int) -> Answer:
        return self.raw.cuPointerGetAttribute(self.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)

    def export_handle(self, address: int) -> Answer:
        result, name = self.raw.cuIpcGetMemHandle(address)
        return (result, b"") if result else (result, bytes(name.reserved))

    def open_handle(self, data: bytes) -> Answer:
        name = self.raw.CUipcMemHandle()
        name.reserved = data
        return self.raw.cuIpcOpenMemHandle(name, self.raw.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)

    def close_handle(self, address: int) -> Answer:
        return self.raw.cuIpcCloseMemHandle(address)

    def import_pool(self, fd: int) -> Answer:
        return self.raw.cuMemPoolImportFromShareableHandle(fd, self._fd_kind(), 0)

    def allow_pool(self, pool: Any, ordinal: int) -> Answer:
        raw = self.raw
        result, access = raw.cuMemPoolGetAccess(pool, self._location(ordinal))
        if result or access == raw.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
            return (result,)
        return raw.cuMemPoolSetAccess(pool, [self._access(ordinal)], 1)

    def import_pointer(self, pool: Any, data: bytes) -> Answer:
        exported = self.raw.CUmemPoolPtrExportData()
        exported.reserved = data
        return self.raw.cuMemPoolImportPointer(pool, exported)

    def import_fd(self, fd: int) -> Answer:
        return self.raw.cuMemImportFromShareableHandle(fd, self._fd_kind())

    def describe(self, allocation: Any) -> Answer:
        raw = self.raw
        result, properties = raw.cuMemGetAllocationPropertiesFromHandle(allocation)
        if result:
            return result, 0, 0
        smallest = raw.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        result, granule = raw.cuMemGetAllocationGranularity(properties, smallest)
        return (result, 0, 0) if result else (result, int(properties.location.id), int(granule))

    def release(self, allocation: Any) -> Answer:
        return self.raw.cuMemRelease(allocation)

    def reserve(self, nbytes: int) -> Answer:
        return self.raw.cuMemAddressReserve(nbytes, 0, 0, 0)

    def free_range(self, base: int, nbytes: int) -> Answer:
        return self.raw.cuMemAddressFree(base, nbytes)

    def map_range(self, base: int, nbytes: int, allocation: Any) -> Answer:
        return self.raw.cuMemMap(base, nbytes, 0, allocation, 0)

    def unmap_range(self, base: int, nbytes: int) -> Answer:
        return self.raw.cuMemUnmap(base, nbytes)

    def allow_range(self, base: int, nbytes: int, ordinal: int) -> Answer:
        return self.raw.cuMemSetAccess(base, nbytes, [self._access(ordinal)], 1)

    def _fd_kind(self) -> Any:
        return self.raw.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _location(self, ordinal: int) -> Any:
        location = self.raw.CUmemLocation()
        location.type = self.raw.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        return location

    def _access(self, ordinal: int) -> Any:
        access = self.raw.CUmemAccessDesc()
        access.location = self._location(ordinal)
        access.flags = self.raw.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access
