"""``GpuApi`` over ``hip`` of hip-python. Functions are looked up when they are called."""

from __future__ import annotations

import ctypes
from typing import Any

from tilewright_server.devices.gpu.api import Answer

__all__ = ["HipApi"]

_NAME_BYTES = 64
_FD_BY_VALUE = 70_100_000
"""Before ROCm 7.1 the runtime wanted the address of a descriptor where CUDA's takes the descriptor itself."""


class HipApi:
    """See ``GpuApi``."""

    def __init__(self, raw: Any, version: int = _FD_BY_VALUE) -> None:
        """``version`` is the runtime's."""
        self.raw = raw
        self._version = version

    def make_current(self, context: Any) -> Answer:
        """Contexts are ordinals."""
        return self.raw.hipSetDevice(context)

    # Streams and events

    def new_stream(self) -> Answer:
        return self.raw.hipStreamCreateWithFlags(self.raw.hipStreamNonBlocking)

    def end_stream(self, stream: Any) -> Answer:
        return self.raw.hipStreamDestroy(stream)

    def query_stream(self, stream: Any) -> Answer:
        return self.raw.hipStreamQuery(stream)

    def wait_stream(self, stream: Any) -> Answer:
        return self.raw.hipStreamSynchronize(stream)

    def record_event(self, event: Any, stream: Any) -> Answer:
        return self.raw.hipEventRecord(event, stream)

    def new_event(self, timing: bool) -> Answer:
        raw = self.raw
        return raw.hipEventCreateWithFlags(raw.hipEventDefault if timing else raw.hipEventDisableTiming)

    def end_event(self, event: Any) -> Answer:
        return self.raw.hipEventDestroy(event)

    def query_event(self, event: Any) -> Answer:
        return self.raw.hipEventQuery(event)

    def wait_event(self, event: Any) -> Answer:
        return self.raw.hipEventSynchronize(event)

    def elapsed_ms(self, begin: Any, end: Any) -> Answer:
        return self.raw.hipEventElapsedTime(begin, end)

    def new_shared_event(self) -> Answer:
        raw = self.raw
        result, event = raw.hipEventCreateWithFlags(raw.hipEventInterprocess | raw.hipEventDisableTiming)
        if result:
            return result, None, b""
        result, name = raw.hipIpcGetEventHandle(event)
        if result:
            raw.hipEventDestroy(event)
            return result, None, b""
        return result, event, bytes(name.reserved)

    def open_event(self, name: bytes) -> Answer:
        return self.raw.hipIpcOpenEventHandle(_filled(self.raw.hipIpcEventHandle_st(), name))

    # Memory

    def fill(self, address: int, nbytes: int, stream: Any) -> Answer:
        return self.raw.hipMemsetD8Async(address, 0, nbytes, stream)

    def copy_in(self, address: int, source: Any, nbytes: int, stream: Any) -> Answer:
        return self.raw.hipMemcpyHtoDAsync(address, source, nbytes, stream)

    def copy_out(self, target: Any, address: int, nbytes: int, stream: Any) -> Answer:
        return self.raw.hipMemcpyDtoHAsync(target, address, nbytes, stream)

    def lock_host(self, memory: memoryview) -> Answer:
        return self.raw.hipHostRegister(memory, memory.nbytes, self.raw.hipHostRegisterDefault)

    def unlock_host(self, memory: memoryview) -> Answer:
        return self.raw.hipHostUnregister(memory)

    def device_address(self, memory: memoryview) -> Answer:
        """Address on the device of memory that ``lock_host`` has locked."""
        result, address = self.raw.hipHostGetDevicePointer(memory, 0)
        return (result, 0) if result else (result, int(address))

    def wait_value(self, stream: Any, address: int, value: int) -> Answer:
        """Let a stream wait until the number at ``address`` is at least ``value``."""
        return self.raw.hipStreamWaitValue64(stream, address, value, self.raw.hipStreamWaitValueGte, (1 << 64) - 1)

    def write_value(self, stream: Any, address: int, value: int) -> Answer:
        """Write a number of 64 bits behind what is on the stream."""
        return self.raw.hipStreamWriteValue64(stream, address, value, 0)

    def allocate(self, nbytes: int) -> Answer:
        return self.raw.hipMalloc(nbytes)

    def free(self, address: int) -> Answer:
        return self.raw.hipFree(address)

    def new_pool(self, ordinal: int, kept: int) -> Answer:
        raw = self.raw
        properties = raw.hipMemPoolProps()
        properties.allocType = raw.hipMemAllocationType.hipMemAllocationTypePinned
        properties.handleTypes = raw.hipMemAllocationHandleType.hipMemHandleTypeNone
        _place(raw, properties.location, ordinal)
        result, pool = raw.hipMemPoolCreate(properties)
        if result:
            return result, None
        threshold = raw.hipMemPoolAttr.hipMemPoolAttrReleaseThreshold
        return raw.hipMemPoolSetAttribute(pool, threshold, ctypes.c_uint64(kept))[0], pool

    def end_pool(self, pool: Any) -> Answer:
        return self.raw.hipMemPoolDestroy(pool)

    def trim_pool(self, pool: Any) -> Answer:
        return self.raw.hipMemPoolTrimTo(pool, 0)

    def pool_use(self, pool: Any) -> Answer:
        raw = self.raw
        used, held = ctypes.c_uint64(), ctypes.c_uint64()
        result = raw.hipMemPoolGetAttribute(pool, raw.hipMemPoolAttr.hipMemPoolAttrUsedMemCurrent, used)[0]
        if not result:
            result = raw.hipMemPoolGetAttribute(pool, raw.hipMemPoolAttr.hipMemPoolAttrReservedMemCurrent, held)[0]
        return result, used.value, held.value

    def take(self, nbytes: int, pool: Any, stream: Any) -> Answer:
        return self.raw.hipMallocFromPoolAsync(nbytes, pool, stream)

    def give_back(self, address: int, stream: Any) -> Answer:
        return self.raw.hipFreeAsync(address, stream)

    # Memory of other processes

    def address_range(self, address: int) -> Answer:
        result, base, size = self.raw.hipMemGetAddressRange(address)
        return (result, 0, 0) if result else (result, int(base), int(size))

    def device_of(self, address: int) -> Answer:
        ordinal = ctypes.c_uint64()  # the runtime writes as many bytes of it as the attribute has
        attribute = self.raw.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return self.raw.hipPointerGetAttribute(ordinal, attribute, address)[0], ordinal.value

    def export_handle(self, address: int) -> Answer:
        result, name = self.raw.hipIpcGetMemHandle(address)
        return (result, b"") if result else (result, bytes(name.reserved))

    def open_handle(self, data: bytes) -> Answer:
        name = _filled(self.raw.hipIpcMemHandle_st(), data)
        return self.raw.hipIpcOpenMemHandle(name, self.raw.hipIpcMemLazyEnablePeerAccess)

    def close_handle(self, address: int) -> Answer:
        return self.raw.hipIpcCloseMemHandle(address)

    def import_pool(self, fd: int) -> Answer:
        return self.raw.hipMemPoolImportFromShareableHandle(fd, self._fd_kind(), 0)

    def allow_pool(self, pool: Any, ordinal: int) -> Answer:
        access = self._access(ordinal)
        result, allowed = self.raw.hipMemPoolGetAccess(pool, access.location)
        if result or allowed == access.flags:
            return (result,)
        return self.raw.hipMemPoolSetAccess(pool, access, 1)

    def import_pointer(self, pool: Any, data: bytes) -> Answer:
        return self.raw.hipMemPoolImportPointer(pool, _filled(self.raw.hipMemPoolPtrExportData(), data))

    def import_fd(self, fd: int) -> Answer:
        given: Any = fd if self._version >= _FD_BY_VALUE else ctypes.c_int(fd)
        return self.raw.hipMemImportFromShareableHandle(given, self._fd_kind())

    def describe(self, allocation: Any) -> Answer:
        raw = self.raw
        result, properties = raw.hipMemGetAllocationPropertiesFromHandle(allocation)
        if result:
            return result, 0, 0
        smallest = raw.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
        result, granule = raw.hipMemGetAllocationGranularity(properties, smallest)
        return (result, 0, 0) if result else (result, int(properties.location.id), int(granule))

    def release(self, allocation: Any) -> Answer:
        return self.raw.hipMemRelease(allocation)

    def reserve(self, nbytes: int) -> Answer:
        return self.raw.hipMemAddressReserve(nbytes, 0, 0, 0)

    def free_range(self, base: int, nbytes: int) -> Answer:
        return self.raw.hipMemAddressFree(base, nbytes)

    def map_range(self, base: int, nbytes: int, allocation: Any) -> Answer:
        return self.raw.hipMemMap(base, nbytes, 0, allocation, 0)

    def unmap_range(self, base: int, nbytes: int) -> Answer:
        return self.raw.hipMemUnmap(base, nbytes)

    def allow_range(self, base: int, nbytes: int, ordinal: int) -> Answer:
        return self.raw.hipMemSetAccess(base, nbytes, self._access(ordinal), 1)

    def _fd_kind(self) -> Any:
        return self.raw.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor

    def _access(self, ordinal: int) -> Any:
        access = self.raw.hipMemAccessDesc()
        _place(self.raw, access.location, ordinal)
        access.flags = self.raw.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
        return access


def _place(raw: Any, location: Any, ordinal: int) -> None:
    location.type = raw.hipMemLocationType.hipMemLocationTypeDevice
    location.id = ordinal


def _filled(name: Any, data: bytes) -> Any:
    """A structure of 64 bytes with a content; its fields cannot be written."""
    ctypes.memmove(int(name), data, min(len(data), _NAME_BYTES))
    return name
