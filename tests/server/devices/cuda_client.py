"""Another process on the same machine, as a client's: ``python cuda_client.py FD CUBIN ORDINAL``.

Commands come over the socket as JSON, answers leave the same way; descriptors beside them. Uses the driver directly, as
a framework would.
"""

from __future__ import annotations

import array
import json
import socket
import sys
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

FLAG = 1 << 20
"""Where the gate's flag lies in the client's allocation of 2 MiB."""


def check(answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:]


class Client:
    def __init__(self, cubin: str, ordinal: int) -> None:
        check(cu.cuInit(0))
        self.ordinal = ordinal
        self.device = check(cu.cuDeviceGet(ordinal))
        check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(self.device))))
        self.stream, self.other = (check(cu.cuStreamCreate(1)) for _ in range(2))
        with open(cubin, "rb") as file:  # noqa: PTH123
            self.module = check(cu.cuModuleLoadData(file.read()))
        self.kept: list[Any] = []
        self.base = 0

    # Memory: 2 MiB that begin with a number of float32, in each of the ways in which allocators make it.

    def legacy(self) -> tuple[dict[str, Any], int]:
        self.base = int(check(cu.cuMemAlloc(2 << 20)))
        return {"data": bytes(check(cu.cuIpcGetMemHandle(self.base)).reserved).hex()}, -1

    def pooled(self) -> tuple[dict[str, Any], int]:
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = kind
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        pool = check(cu.cuMemPoolCreate(properties))
        self.base = int(check(cu.cuMemAllocFromPoolAsync(2 << 20, pool, self.stream)))
        check(cu.cuStreamSynchronize(self.stream))
        fd = int(check(cu.cuMemPoolExportToShareableHandle(pool, kind, 0)))
        self.kept.append(pool)
        return {"data": bytes(check(cu.cuMemPoolExportPointer(self.base)).reserved).hex()}, fd

    def virtual(self) -> tuple[dict[str, Any], int]:
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = kind
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        allocation = check(cu.cuMemCreate(2 << 20, properties, 0))
        self.base = int(check(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)))
        check(cu.cuMemMap(self.base, 2 << 20, 0, allocation, 0))
        access = cu.CUmemAccessDesc()
        access.location.type = properties.location.type
        access.location.id = self.ordinal
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cu.cuMemSetAccess(self.base, 2 << 20, [access], 1))
        self.kept.append(allocation)
        return {"data": ""}, int(check(cu.cuMemExportToShareableHandle(allocation, kind, 0)))

    def free(self) -> tuple[dict[str, Any], int]:
        check(cu.cuMemFree(self.base))
        return {}, -1

    def put(self, offset: int, values: list[float]) -> tuple[dict[str, Any], int]:
        data = np.asarray(values, np.float32)
        check(cu.cuMemcpyHtoDAsync(self.base + offset, data, data.nbytes, self.stream))
        check(cu.cuStreamSynchronize(self.stream))
        return {}, -1

    def get(self, offset: int, count: int) -> tuple[dict[str, Any], int]:
        data = np.zeros(count, np.float32)
        check(cu.cuMemcpyDtoHAsync(data, self.base + offset, data.nbytes, self.stream))
        check(cu.cuStreamSynchronize(self.stream))
        return {"values": data.tolist()}, -1

    def open(self, data: str, offset: int) -> tuple[dict[str, Any], int]:
        """Map the server's memory, to be used like our own."""
        handle = cu.CUipcMemHandle()
        handle.reserved = bytes.fromhex(data)
        self.base = int(check(cu.cuIpcOpenMemHandle(handle, 1))) + offset
        return {}, -1

    # Events: a producer that stands behind a closed gate, and the server's completion.

    def produce(self, values: list[float]) -> tuple[dict[str, Any], int]:
        check(cu.cuMemsetD8Async(self.base + FLAG, 0, 8, self.stream))
        self.event = check(cu.cuEventCreate(6))
        gate = check(cu.cuModuleGetFunction(self.module, b"gate"))
        param = np.asarray([self.base + FLAG], np.uint64)
        params = np.asarray([param.ctypes.data], np.uint64)
        check(cu.cuLaunchKernel(gate, 1, 1, 1, 1, 1, 1, 0, self.stream, params.ctypes.data, 0))
        data = np.asarray(values, np.float32)
        check(cu.cuMemcpyHtoDAsync(self.base, data, data.nbytes, self.stream))
        check(cu.cuEventRecord(self.event, self.stream))
        return {"event": bytes(check(cu.cuIpcGetEventHandle(self.event)).reserved).hex()}, -1

    def completion(self, event: str) -> tuple[dict[str, Any], int]:
        handle = cu.CUipcEventHandle()
        handle.reserved = bytes.fromhex(event)
        self.completed = check(cu.cuIpcOpenEventHandle(handle))
        return {}, -1

    def open_gate(self) -> tuple[dict[str, Any], int]:
        one = np.asarray([1], np.int64)
        check(cu.cuMemcpyHtoDAsync(self.base + FLAG, one, 8, self.other))
        check(cu.cuStreamSynchronize(self.other))
        return {}, -1

    def consume(self, offset: int, count: int) -> tuple[dict[str, Any], int]:
        """Read behind the server's completion event, ordered by the device alone."""
        check(cu.cuStreamWaitEvent(self.stream, self.completed, 0))
        return self.get(offset, count)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    client = Client(sys.argv[2], int(sys.argv[3]))
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
