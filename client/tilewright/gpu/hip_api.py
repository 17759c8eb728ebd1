"""The functions of HIP's runtime that the client calls, as ``hip_runtime_api.h`` declares them, and how devices are
called.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from tilewright.gpu.driver import Handle, Names

__all__ = ["NAMES", "SIGNATURES", "PointerInfo", "format_uuid"]

NAMES = Names(
    error_name="hipGetErrorName",
    error_string="hipGetErrorString",
    device_count="hipGetDeviceCount",
    finish_device="hipDeviceSynchronize",
    new_event="hipEventCreateWithFlags",
    end_event="hipEventDestroy",
    record="hipEventRecord",
    query_event="hipEventQuery",
    finish_event="hipEventSynchronize",
    wait="hipStreamWaitEvent",
    query_stream="hipStreamQuery",
    finish_stream="hipStreamSynchronize",
    capturing="hipStreamIsCapturing",
    copy_in="hipMemcpyHtoDAsync",
    copy_out="hipMemcpyDtoHAsync",
    export_memory="hipIpcGetMemHandle",
    open_memory="hipIpcOpenMemHandle",
    close_memory="hipIpcCloseMemHandle",
    export_event="hipIpcGetEventHandle",
    open_event="hipIpcOpenEventHandle",
    retain="hipMemRetainAllocationHandle",
    export_allocation="hipMemExportToShareableHandle",
    release="hipMemRelease",
)


class PointerInfo(ctypes.Structure):
    """``hipPointerAttribute_t``."""

    _fields_ = (
        ("type", c_int),
        ("device", c_int),
        ("device_pointer", c_void_p),
        ("host_pointer", c_void_p),
        ("managed", c_int),
        ("flags", c_uint),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "hipInit": (c_uint,),
    "hipGetErrorName": (c_int,),
    "hipGetErrorString": (c_int,),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceSynchronize": (),
    "hipDeviceGetUuid": (c_void_p, c_int),
    "hipDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "hipPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "hipPointerGetAttributes": (POINTER(PointerInfo), c_uint64),
    "hipMemGetAddressRange": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "hipIpcGetMemHandle": (POINTER(Handle), c_uint64),
    "hipIpcOpenMemHandle": (POINTER(c_uint64), Handle, c_uint),
    "hipIpcCloseMemHandle": (c_uint64,),
    "hipMemRetainAllocationHandle": (POINTER(c_uint64), c_uint64),
    "hipMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "hipMemRelease": (c_uint64,),
    "hipEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipEventDestroy": (c_void_p,),
    "hipEventRecord": (c_void_p, c_void_p),
    "hipEventQuery": (c_void_p,),
    "hipEventSynchronize": (c_void_p,),
    "hipStreamQuery": (c_void_p,),
    "hipStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "hipStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "hipStreamSynchronize": (c_void_p,),
    "hipStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipStreamDestroy": (c_void_p,),
    "hipStreamWaitValue64": (c_void_p, c_uint64, c_uint64, c_uint, c_uint64),
    "hipStreamWriteValue64": (c_void_p, c_uint64, c_uint64, c_uint),
    "hipHostRegister": (c_uint64, c_size_t, c_uint),
    "hipHostUnregister": (c_uint64,),
    "hipHostGetDevicePointer": (POINTER(c_uint64), c_uint64, c_uint),
    "hipIpcGetEventHandle": (POINTER(Handle), c_void_p),
    "hipIpcOpenEventHandle": (POINTER(c_void_p), Handle),
    "hipMemcpyDtoHAsync": (c_void_p, c_uint64, c_size_t, c_void_p),
    "hipMemcpyHtoDAsync": (c_uint64, c_void_p, c_size_t, c_void_p),
}

_DIGITS = frozenset(b"0123456789abcdefABCDEF")


def format_uuid(data: bytes, bus: str) -> str:
    """A device as ROCm's tools write it: the runtime gives 16 hexadecimal digits as text.

    Boards without a number of their own have something else there, the same for all: those are called by their place
    on the PCI bus, for example ``0000:63:00.0``.

    >>> format_uuid(b"a1b2c3d401020300", "0000:63:00.0")
    'GPU-a1b2c3d401020300'
    >>> format_uuid(bytes(16), "0000:63:00.0")
    'PCI-00000000:63:00.0'
    """
    if len(data) == 16 and set(data) <= _DIGITS:
        return f"GPU-{data.decode()}"
    domain, _, rest = bus.lower().partition(":")
    return f"PCI-{domain:0>8}:{rest}"
