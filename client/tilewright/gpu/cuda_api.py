"""The functions of the CUDA driver that the client calls, as ``<cuda.h>`` declares them, and how it names devices."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from tilewright.gpu.driver import Handle, Names

__all__ = ["NAMES", "SIGNATURES", "format_uuid"]

NAMES = Names(
    error_name="cuGetErrorName",
    error_string="cuGetErrorString",
    device_count="cuDeviceGetCount",
    finish_device="cuCtxSynchronize",
    new_event="cuEventCreate",
    end_event="cuEventDestroy_v2",
    record="cuEventRecord",
    query_event="cuEventQuery",
    finish_event="cuEventSynchronize",
    wait="cuStreamWaitEvent",
    query_stream="cuStreamQuery",
    finish_stream="cuStreamSynchronize",
    capturing="cuStreamIsCapturing",
    copy_in="cuMemcpyHtoDAsync_v2",
    copy_out="cuMemcpyDtoHAsync_v2",
    export_memory="cuIpcGetMemHandle",
    open_memory="cuIpcOpenMemHandle_v2",
    close_memory="cuIpcCloseMemHandle",
    export_event="cuIpcGetEventHandle",
    open_event="cuIpcOpenEventHandle",
    retain="cuMemRetainAllocationHandle",
    export_allocation="cuMemExportToShareableHandle",
    release="cuMemRelease",
)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuPointerGetAttribute": (POINTER(c_uint64), c_int, c_uint64),
    "cuPointerGetAttributes": (c_uint, POINTER(c_int), POINTER(c_void_p), c_uint64),
    "cuIpcGetMemHandle": (POINTER(Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemPoolExportToShareableHandle": (POINTER(c_int), c_void_p, c_int, c_uint64),
    "cuMemPoolExportPointer": (POINTER(Handle), c_uint64),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuEventSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuIpcGetEventHandle": (POINTER(Handle), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), Handle),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
}


def format_uuid(data: bytes) -> str:
    """A device's UUID as people write it: ``GPU-`` and five groups of hexadecimal digits."""
    text = data.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
