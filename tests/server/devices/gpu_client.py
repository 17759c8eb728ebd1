"""Another process on the same machine, as a client's: ``python gpu_client.py KIND FD BINARY ORDINAL``.

Commands come over the socket as JSON, answers leave the same way; descriptors beside them. Uses the driver directly, as
a framework would.
"""

from __future__ import annotations

import array
import ctypes
import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

FLAG = 1 << 20
"""Where the gate's flag lies in the client's allocation."""
SIZE = 2 << 20
NON_BLOCKING, FOR_OTHERS, LAZY = 1, 6, 1


def check(answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:]


class Cuda:
    """The calls of CUDA's driver that differ from HIP's by more than their names."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver as cu

        self.cu, self.ordinal, self.kept = cu, ordinal, []
        check(cu.cuInit(0))
        check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(ordinal))))))
        self.fd_kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def call(self, name: str, *arguments: Any) -> Any:
        """``Malloc`` and so on, which both drivers have."""
        return check(getattr(self.cu, f"cu{name}")(*arguments))

    def stream(self) -> Any:
        return self.call("StreamCreate", NON_BLOCKING)

    def event(self) -> Any:
        return self.call("EventCreate", FOR_OTHERS)

    def malloc(self) -> int:
        return int(self.call("MemAlloc", SIZE))

    def free(self, address: int) -> None:
        self.call("MemFree", address)

    def named(self, kind: str, data: str) -> Any:
        """A handle of another process."""
        handle = getattr(self.cu, f"CUipc{kind}Handle")()
        handle.reserved = bytes.fromhex(data)
        return handle

    def located(self, properties: Any) -> Any:
        location = self.cu.CUmemLocation()
        location.type, location.id = self.cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, self.ordinal
        properties.location = location
        return properties

    def pooled(self, stream: Any) -> tuple[int, int]:
        """Address, and the pool's descriptor."""
        properties = self.located(self.cu.CUmemPoolProps())
        properties.allocType = self.cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = self.fd_kind
        pool = self.call("MemPoolCreate", properties)
        self.kept.append(pool)
        address = int(self.call("MemAllocFromPoolAsync", SIZE, pool, stream))
        return address, int(self.call("MemPoolExportToShareableHandle", pool, self.fd_kind, 0))

    def virtual(self) -> tuple[int, int]:
        properties = self.located(self.cu.CUmemAllocationProp())
        properties.type = self.cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self.fd_kind
        allocation = self.call("MemCreate", SIZE, properties, 0)
        self.kept.append(allocation)
        access = self.located(self.cu.CUmemAccessDesc())
        access.flags = self.cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return self.mapped(allocation, [access]), int(
            self.call("MemExportToShareableHandle", allocation, self.fd_kind, 0)
        )

    def mapped(self, allocation: Any, access: Any) -> int:
        address = int(self.call("MemAddressReserve", SIZE, 0, 0, 0))
        self.call("MemMap", address, SIZE, 0, allocation, 0)
        self.call("MemSetAccess", address, SIZE, access, 1)
        return address

    def run_gate(self, binary: bytes, flag: int, stream: Any) -> None:
        gate = self.call("ModuleGetFunction", self.call("ModuleLoadData", binary), b"gate")
        param = np.asarray([flag], np.uint64)
        params = np.asarray([param.ctypes.data], np.uint64)
        self.call("LaunchKernel", gate, 1, 1, 1, 1, 1, 1, 0, stream, params.ctypes.data, 0)


class Hip(Cuda):
    """The same of HIP."""

    def __init__(self, ordinal: int) -> None:
        from hip import hip

        self.hip, self.ordinal, self.kept = hip, ordinal, []
        check(hip.hipInit(0))
        check(hip.hipSetDevice(ordinal))
        self.fd_kind = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor

    def call(self, name: str, *arguments: Any) -> Any:
        return check(getattr(self.hip, f"hip{name}")(*arguments))

    def stream(self) -> Any:
        return self.call("StreamCreateWithFlags", NON_BLOCKING)

    def event(self) -> Any:
        return self.call("EventCreateWithFlags", FOR_OTHERS)

    def malloc(self) -> int:
        return int(self.call("Malloc", SIZE))

    def free(self, address: int) -> None:
        self.call("Free", address)

    def named(self, kind: str, data: str) -> Any:
        handle = getattr(self.hip, f"hipIpc{kind}Handle_st")()
        ctypes.memmove(int(handle), bytes.fromhex(data), 64)
        return handle

    def located(self, properties: Any) -> Any:
        properties.location.type = self.hip.hipMemLocationType.hipMemLocationTypeDevice
        properties.location.id = self.ordinal
        return properties

    def pooled(self, stream: Any) -> tuple[int, int]:
        properties, fd = self.located(self.hip.hipMemPoolProps()), ctypes.c_int()
        properties.allocType = self.hip.hipMemAllocationType.hipMemAllocationTypePinned
        properties.handleTypes = self.fd_kind
        pool = self.call("MemPoolCreate", properties)
        self.kept.append(pool)
        address = int(self.call("MallocFromPoolAsync", SIZE, pool, stream))
        self.call("MemPoolExportToShareableHandle", fd, pool, self.fd_kind, 0)
        return address, fd.value

    def virtual(self) -> tuple[int, int]:
        properties, fd = self.located(self.hip.hipMemAllocationProp()), ctypes.c_int()
        properties.type = self.hip.hipMemAllocationType.hipMemAllocationTypePinned
        # The field is in a union without a name, which the package has not; it is the second word.
        ctypes.c_int.from_address(int(properties) + 4).value = int(self.fd_kind)
        allocation = self.call("MemCreate", SIZE, properties, 0)
        self.kept.append(allocation)
        access = self.located(self.hip.hipMemAccessDesc())
        access.flags = self.hip.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
        address = self.mapped(allocation, access)
        self.call("MemExportToShareableHandle", fd, allocation, self.fd_kind, 0)
        return address, fd.value

    def run_gate(self, binary: bytes, flag: int, stream: Any) -> None:
        self.kept.append(binary)
        gate = self.call("ModuleGetFunction", self.call("ModuleLoadData", binary), "gate")
        param, size = ctypes.c_uint64(flag), ctypes.c_size_t(8)
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(param), 2, ctypes.addressof(size), 3)
        self.call("ModuleLaunchKernel", gate, 1, 1, 1, 1, 1, 1, 0, stream, None, extra)


class Client:
    """Commands by name; each returns what is said, and a descriptor or -1."""

    def __init__(self, kind: str, binary: str, ordinal: int) -> None:
        self.gpu = {"cuda": Cuda, "hip": Hip}[kind](ordinal)
        self.call = self.gpu.call
        self.binary = Path(binary).read_bytes()
        self.stream, self.other = self.gpu.stream(), self.gpu.stream()
        self.base = 0

    # Memory: 2 MiB that begin with a number of float32, in each of the ways in which allocators make it.

    def legacy(self) -> tuple[dict[str, Any], int]:
        self.base = self.gpu.malloc()
        return {"data": bytes(self.call("IpcGetMemHandle", self.base).reserved).hex()}, -1

    def pooled(self) -> tuple[dict[str, Any], int]:
        self.base, fd = self.gpu.pooled(self.stream)
        self.call("StreamSynchronize", self.stream)
        return {"data": bytes(self.call("MemPoolExportPointer", self.base).reserved).hex()}, fd

    def virtual(self) -> tuple[dict[str, Any], int]:
        self.base, fd = self.gpu.virtual()
        return {"data": ""}, fd

    def free(self) -> tuple[dict[str, Any], int]:
        self.gpu.free(self.base)
        return {}, -1

    def put(self, offset: int, values: list[float]) -> tuple[dict[str, Any], int]:
        data = np.asarray(values, np.float32)
        self.call("MemcpyHtoDAsync", self.base + offset, data, data.nbytes, self.stream)
        self.call("StreamSynchronize", self.stream)
        return {}, -1

    def get(self, offset: int, count: int) -> tuple[dict[str, Any], int]:
        data = np.zeros(count, np.float32)
        self.call("MemcpyDtoHAsync", data, self.base + offset, data.nbytes, self.stream)
        self.call("StreamSynchronize", self.stream)
        return {"values": data.tolist()}, -1

    def open(self, data: str, offset: int) -> tuple[dict[str, Any], int]:
        """Map the server's memory, to be used like our own."""
        self.base = int(self.call("IpcOpenMemHandle", self.gpu.named("Mem", data), LAZY)) + offset
        return {}, -1

    # Events: a producer that stands behind a closed gate, and the server's completion.

    def produce(self, values: list[float]) -> tuple[dict[str, Any], int]:
        self.call("MemsetD8Async", self.base + FLAG, 0, 8, self.stream)
        self.event = self.gpu.event()
        self.gpu.run_gate(self.binary, self.base + FLAG, self.stream)
        data = np.asarray(values, np.float32)
        self.call("MemcpyHtoDAsync", self.base, data, data.nbytes, self.stream)
        self.call("EventRecord", self.event, self.stream)
        return {"event": bytes(self.call("IpcGetEventHandle", self.event).reserved).hex()}, -1

    def completion(self, event: str) -> tuple[dict[str, Any], int]:
        self.completed = self.call("IpcOpenEventHandle", self.gpu.named("Event", event))
        return {}, -1

    def open_gate(self) -> tuple[dict[str, Any], int]:
        one = np.asarray([1], np.int64)
        self.call("MemcpyHtoDAsync", self.base + FLAG, one, 8, self.other)
        self.call("StreamSynchronize", self.other)
        return {}, -1

    def consume(self, offset: int, count: int) -> tuple[dict[str, Any], int]:
        """Read behind the server's completion event, ordered by the device alone."""
        self.call("StreamWaitEvent", self.stream, self.completed, 0)
        return self.get(offset, count)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[2]))
    client = Client(sys.argv[1], sys.argv[3], int(sys.argv[4]))
    while data := connection.recv(1 << 20):
        request = json.loads(data)
        try:
            answer, fd = getattr(client, request.pop("do"))(**request)
        except Exception as error:
            answer, fd = {"error": f"{type(error).__name__}: {error}"}, -1
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        connection.sendmsg([json.dumps(answer).encode()], rights)


if __name__ == "__main__":
    main()
