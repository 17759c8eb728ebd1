"""What hip-python is made to do with the simulated runtime, in processes of their own.

    python hip_driving.py CASE

prints one JSON object. ``test_hip_simulated.py`` runs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from hip import hip, hiprtc

SOURCE = rb"""
extern "C" __global__ __launch_bounds__(256) void rev_axpy(const float* x, float* y, float a, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  __syncthreads();
  if (i < n) y[i] += a * tile[255 - threadIdx.x];
}
extern "C" __global__ void gate(const long long* open) { if (!*open) __builtin_trap(); }
"""
COUNT = 500
TO_DEVICE = hip.hipMemcpyKind.hipMemcpyHostToDevice
TO_HOST = hip.hipMemcpyKind.hipMemcpyDeviceToHost
NON_BLOCKING, FOR_OTHERS, LAZY = 1, 2 | 4, 1


def check(answer: tuple[Any, ...]) -> Any:
    """The value of an answer. Raises ``RuntimeError`` with the result's name."""
    if int(answer[0]):
        raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:]


def name(answer: tuple[Any, ...]) -> str:
    return str(answer[0].name)


def say(found: Any) -> None:
    """To whoever started this process."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def compiled(arch: str, source: bytes = SOURCE) -> bytes:
    program = check(hiprtc.hiprtcCreateProgram(source, b"cases.hip", 0, None, None))
    check(hiprtc.hiprtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()]))
    code = bytearray(check(hiprtc.hiprtcGetCodeSize(program)))
    check(hiprtc.hiprtcGetCode(program, code))
    return bytes(code)


def arch_of(device: int) -> str:
    return str(check(hip.hipGetDeviceProperties(device)).gcnArchName).partition(":")[0]


def address(pointer: Any) -> int:
    return int(pointer)


class Arguments:
    """A block of arguments as ``extra`` wants it."""

    def __init__(self, layout: str, *values: Any) -> None:
        data = struct.pack(layout, *values)
        self.block = ctypes.create_string_buffer(data, len(data))
        self.size = ctypes.c_size_t(len(data))
        places = (1, ctypes.addressof(self.block), 2, ctypes.addressof(self.size), 3)
        self.extra = (ctypes.c_void_p * 5)(*places)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.extra)


class Axpy:
    """A stream and operands, and the kernel on them."""

    def __init__(self, device: int = 0) -> None:
        check(hip.hipSetDevice(device))
        self.module = check(hip.hipModuleLoadData(compiled(arch_of(device))))
        self.function = check(hip.hipModuleGetFunction(self.module, b"rev_axpy"))
        self.stream = check(hip.hipStreamCreateWithFlags(NON_BLOCKING))
        self.x = np.random.default_rng(device).random(512, np.float32)
        self.y = np.ones(512, np.float32)
        self.places = [address(check(hip.hipMalloc(2048))) for _ in range(2)]
        for place, values in zip(self.places, (self.x, self.y), strict=True):
            check(hip.hipMemcpyAsync(place, values, 2048, TO_DEVICE, self.stream))

    def launch(self, factor: float = 3.0, x: int | None = None) -> str:
        arguments = Arguments("<QQfi", self.places[0] if x is None else x, self.places[1], factor, COUNT)
        shape = (2, 1, 1, 256, 1, 1, 0)
        return name(hip.hipModuleLaunchKernel(self.function, *shape, self.stream, None, arguments.address))

    def result(self) -> Any:
        found = np.empty(512, np.float32)
        check(hip.hipMemcpyAsync(found, self.places[1], 2048, TO_HOST, self.stream))
        check(hip.hipStreamSynchronize(self.stream))
        return found

    def expected(self, factor: float) -> Any:
        turned = self.x.reshape(2, 256)[:, ::-1].reshape(-1)
        return np.where(np.arange(512) < COUNT, self.y + np.float32(factor) * turned, self.y)


def chips() -> Any:
    """Each device compiles, loads, launches and copies; a binary of another arch is refused."""
    found = []
    for device in range(check(hip.hipGetDeviceCount())):
        case = Axpy(device)
        launched = case.launch()
        limits = hip.hipFunction_attribute
        wrong = compiled("gfx90a" if arch_of(device) != "gfx90a" else "gfx942")
        found.append(
            {
                "arch": arch_of(device),
                "launch": launched,
                "error": float(np.abs(case.result() - case.expected(3)).max()),
                "threads": check(
                    hip.hipFuncGetAttribute(limits.HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, case.function)
                ),
                "lds": check(hip.hipFuncGetAttribute(limits.HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, case.function)),
                "registers": check(hip.hipFuncGetAttribute(limits.HIP_FUNC_ATTRIBUTE_NUM_REGS, case.function)),
                "wave": check(hip.hipGetDeviceProperties(device)).warpSize,
                "wrong": name(hip.hipModuleLoadData(wrong)),
                "missing": name(hip.hipModuleGetFunction(case.module, b"axpy")),
                "broken": name(hip.hipModuleLoadData(b"\x7fELF" + bytes(100))),
            }
        )
    return found


def graph() -> Any:
    """A captured launch runs when its graph is launched, whatever has become of the graph and the host's arguments."""
    case = Axpy()
    check(hip.hipStreamSynchronize(case.stream))
    check(hip.hipStreamBeginCapture(case.stream, hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed))
    busy = name(hip.hipStreamQuery(case.stream))
    case.launch(1.0)
    graph = check(hip.hipStreamEndCapture(case.stream))
    runs = check(hip.hipGraphInstantiateWithFlags(graph, 0))
    again = name(hip.hipGraphInstantiateWithFlags(graph, 0))
    hip.hipGraphDestroy(graph)
    before = float(np.abs(case.result() - case.y).max())
    for _ in range(2):
        hip.hipGraphLaunch(runs, case.stream)
    hip.hipGraphExecDestroy(runs)
    error = float(np.abs(case.result() - case.expected(2)).max())
    return {"capturing": busy, "before": before, "error": error, "again": again}


def streams() -> Any:
    """A stream that does not block goes on beside a gate; the default stream waits for those that do."""
    module = check(hip.hipModuleLoadData(compiled(arch_of(0))))
    gate = check(hip.hipModuleGetFunction(module, b"gate"))
    flag, target = (address(check(hip.hipMalloc(4096))) for _ in range(2))
    check(hip.hipMemset(flag, 0, 4096))
    held, free = (check(hip.hipStreamCreateWithFlags(flags)) for flags in (0, NON_BLOCKING))
    one = Arguments("<Q", flag)
    check(hip.hipModuleLaunchKernel(gate, 1, 1, 1, 64, 1, 1, 0, held, None, one.address))
    check(hip.hipMemsetAsync(target, 1, 64, free))
    check(hip.hipStreamSynchronize(free))
    check(hip.hipMemsetAsync(target, 2, 64, None))
    event = check(hip.hipEventCreate())
    check(hip.hipEventRecord(event, None))
    time.sleep(0.05)
    waiting = [name(hip.hipStreamQuery(held)), name(hip.hipEventQuery(event))]
    check(hip.hipMemsetAsync(flag, 1, 8, free))
    check(hip.hipEventSynchronize(event))
    found = np.empty(64, np.uint8)
    check(hip.hipMemcpy(found, target, 64, TO_HOST))
    return {"waiting": waiting, "after": found.tolist(), "held": name(hip.hipStreamQuery(held))}


def _other(case: str, *more: str, fd: int | None = None) -> subprocess.Popen[str]:
    fds = () if fd is None else (fd,)
    argv = [sys.executable, __file__, case, *more]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds)


def shared() -> Any:
    """Another process waits, by an event, for memory that this one writes behind a gate, and answers in it."""
    module = check(hip.hipModuleLoadData(compiled(arch_of(0))))
    gate = check(hip.hipModuleGetFunction(module, b"gate"))
    flag, memory = (address(check(hip.hipMalloc(1 << 20))) for _ in range(2))
    check(hip.hipMemset(flag, 0, 8))
    check(hip.hipMemset(memory, 0, 1 << 20))
    stream, opener = (check(hip.hipStreamCreateWithFlags(NON_BLOCKING)) for _ in range(2))
    one = Arguments("<Q", flag)
    check(hip.hipModuleLaunchKernel(gate, 1, 1, 1, 64, 1, 1, 0, stream, None, one.address))
    check(hip.hipMemsetAsync(memory, 7, 1 << 20, stream))
    event = check(hip.hipEventCreateWithFlags(FOR_OTHERS))
    check(hip.hipEventRecord(event, stream))
    handle = bytes(check(hip.hipIpcGetMemHandle(memory)).reserved)
    inner = bytes(check(hip.hipIpcGetMemHandle(memory + 4096)).reserved)
    signal = bytes(check(hip.hipIpcGetEventHandle(event)).reserved)
    with _other("borrower", handle.hex(), inner.hex(), signal.hex()) as other:
        assert other.stdin is not None and other.stdout is not None
        first = json.loads(other.stdout.readline())
        check(hip.hipMemsetAsync(flag, 1, 8, opener))
        rest = json.loads(other.stdout.readline())
    found = np.empty(16, np.uint8)
    check(hip.hipMemcpy(found, memory, 16, TO_HOST))
    return {**first, **rest, "answer": found.tolist(), "own": name(hip.hipIpcOpenMemHandle(handle, LAZY))}


def borrower() -> Any:
    memory, inner, signal = (bytes.fromhex(text) for text in sys.argv[2:5])
    base = address(check(hip.hipIpcOpenMemHandle(memory, LAZY)))
    check(hip.hipIpcCloseMemHandle(base))
    place = address(check(hip.hipIpcOpenMemHandle(inner, LAZY)))
    start, size = check(hip.hipMemGetAddressRange(place))
    event = check(hip.hipIpcOpenEventHandle(signal))
    stream = check(hip.hipStreamCreateWithFlags(NON_BLOCKING))
    check(hip.hipStreamWaitEvent(stream, event, 0))
    before = name(hip.hipStreamQuery(stream))
    say({"before": before, "offset": place - address(start), "size": size})
    found = np.empty(1024, np.uint8)
    check(hip.hipMemcpyAsync(found, place, 1024, TO_HOST, stream))
    check(hip.hipMemsetAsync(address(start), 9, 16, stream))
    check(hip.hipStreamSynchronize(stream))
    check(hip.hipIpcCloseMemHandle(place))
    return {"seen": sorted(set(found.tolist())), "unknown": name(hip.hipIpcOpenMemHandle(bytes(64), LAZY))}


def _reserved(allocation: Any, size: int) -> int:
    base = address(check(hip.hipMemAddressReserve(size, 0, None, 0)))
    check(hip.hipMemMap(base, size, 0, allocation, 0))
    access = hip.hipMemAccessDesc()
    access.location.type = hip.hipMemLocationType.hipMemLocationTypeDevice
    access.location.id = 0
    access.flags = hip.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
    check(hip.hipMemSetAccess(base, size, access, 1))
    return base


def mapped() -> Any:
    """Memory by a descriptor: written here, read and answered there; a mapping outlives its allocation's handle."""
    size = 4 << 20
    wanted = hip.hipMemAllocationProp()
    wanted.type = hip.hipMemAllocationType.hipMemAllocationTypePinned
    ctypes.c_int.from_address(int(wanted) + 4).value = 1  # POSIX descriptors; the class has no name for the field
    wanted.location.type = hip.hipMemLocationType.hipMemLocationTypeDevice
    allocation = check(hip.hipMemCreate(size, wanted, 0))
    base = _reserved(allocation, size)
    check(hip.hipMemset(base, 5, size))
    fd = ctypes.c_int(-1)
    kind = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
    check(hip.hipMemExportToShareableHandle(ctypes.addressof(fd), allocation, kind, 0))
    check(hip.hipMemRelease(allocation))
    legacy = name(hip.hipIpcGetMemHandle(base))
    ours, theirs = socket.socketpair()
    with ours, theirs, _other("mapper", str(theirs.fileno()), fd=theirs.fileno()) as other:
        socket.send_fds(ours, [b"memory"], [fd.value])
        os.close(fd.value)
        assert other.stdout is not None
        there = json.loads(other.stdout.readline())
    found = np.empty(size, np.uint8)
    check(hip.hipMemcpy(found, base, size, TO_HOST))
    check(hip.hipMemUnmap(base, size))
    check(hip.hipMemAddressFree(base, size))
    return {**there, "legacy": legacy, "answer": sorted(set(found.tolist()))}


def mapper() -> Any:
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        _, (fd,), _, _ = socket.recv_fds(channel, 16, 1)
    kind = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
    allocation = check(hip.hipMemImportFromShareableHandle(fd, kind))
    os.close(fd)
    base = _reserved(allocation, 4 << 20)
    found = np.empty(4 << 20, np.uint8)
    check(hip.hipMemcpy(found, base, found.nbytes, TO_HOST))
    check(hip.hipMemset(base, 6, found.nbytes))
    return {"seen": sorted(set(found.tolist()))}


def launches() -> Any:
    """Three launches one after the other, and what is asked afterwards: for faults."""
    case = Axpy()
    found: dict[str, Any] = {"launch": [], "wait": []}
    for _ in range(3):
        found["launch"].append(case.launch(1.0))
        found["wait"].append(name(hip.hipStreamSynchronize(case.stream)))
    return {**found, "later": name(hip.hipMalloc(4096)), "event": name(hip.hipEventCreate())}


def stray() -> Any:
    """A launch that reads what is nowhere."""
    case = Axpy()
    launched = case.launch(1.0, x=1 << 40)
    return {
        "launch": launched,
        "wait": name(hip.hipStreamSynchronize(case.stream)),
        "later": name(hip.hipMalloc(4096)),
    }


def memory() -> Any:
    """Allocations, one after the other."""
    stream = check(hip.hipStreamCreateWithFlags(NON_BLOCKING))
    found = [name(hip.hipMalloc(4096)) for _ in range(2)] + [name(hip.hipMallocAsync(4096, stream))]
    left, total = check(hip.hipMemGetInfo())
    return {"found": found, "too_much": name(hip.hipMalloc(total)), "used": total - left}


def image() -> Any:
    return {"load": name(hip.hipModuleLoadData(compiled(arch_of(0))))}


def versions() -> Any:
    return {"driver": check(hip.hipDriverGetVersion()), "count": name(hip.hipGetDeviceCount())}


def sources() -> Any:
    """Programs that do not compile, and one with a header of its own."""
    program = check(hiprtc.hiprtcCreateProgram(b"int f() { return missing; }", b"bad.hip", 0, None, None))
    result = name(hiprtc.hiprtcCompileProgram(program, 1, [b"--offload-arch=gfx942"]))
    log = bytearray(check(hiprtc.hiprtcGetProgramLogSize(program)))
    check(hiprtc.hiprtcGetProgramLog(program, log))
    library = ctypes.CDLL("libhiprtc.so")
    made, one = ctypes.c_void_p(), ctypes.c_char_p * 1
    text = b'#include "own/own.h"\nextern "C" __global__ void k(int* p) { *p = ANSWER; }'
    library.hiprtcCreateProgram(ctypes.byref(made), text, b"k", 1, one(b"#define ANSWER 42"), one(b"own/own.h"))
    fine = library.hiprtcCompileProgram(made, 1, one(b"--offload-arch=gfx1201"))
    return {"result": result, "log": log.decode(), "code": name(hiprtc.hiprtcGetCodeSize(program)), "fine": fine}


_ALL = (chips, graph, streams, shared, borrower, mapped, mapper, launches, stray, memory, image, versions, sources)
CASES: dict[str, Callable[[], Any]] = {case.__name__: case for case in _ALL}

if __name__ == "__main__":
    say(CASES[sys.argv[1]]())
