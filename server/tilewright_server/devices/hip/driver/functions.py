"""Functions of HIP's runtime that the device calls: those without which it cannot be used, and those that it can spare.

hip-python looks a function up when it is first called, which may be long after the first launch. So all are looked up
when devices are searched for and when one is opened.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["OPTIONAL", "REQUIRED", "Without", "lacking", "spared"]

_MAPS = Path("/proc/self/maps")
_LIBRARY = "/libamdhip64.so"

REQUIRED: tuple[str, ...] = (
    "hipInit", "hipRuntimeGetVersion", "hipGetDeviceCount", "hipGetDevicePropertiesR0600", "hipDeviceGetAttribute",
    "hipDeviceGetUuid", "hipSetDevice", "hipStreamCreateWithFlags", "hipStreamDestroy", "hipStreamQuery",
    "hipStreamSynchronize", "hipStreamWaitEvent", "hipEventCreateWithFlags", "hipEventDestroy", "hipEventRecord",
    "hipEventQuery", "hipEventSynchronize", "hipEventElapsedTime", "hipMalloc", "hipFree", "hipMemsetD8Async",
    "hipMemcpyHtoDAsync", "hipMemcpyDtoHAsync", "hipHostRegister", "hipHostUnregister", "hipMemGetAddressRange",
    "hipMallocFromPoolAsync", "hipFreeAsync", "hipMemPoolCreate", "hipMemPoolDestroy", "hipMemPoolSetAttribute",
    "hipMemPoolGetAttribute", "hipMemPoolTrimTo", "hipModuleLoadData", "hipModuleUnload", "hipModuleGetFunction",
    # Called by libtilewright:
    "hipGetDevice", "hipMallocAsync", "hipMemsetAsync", "hipMemcpyHtoD", "hipModuleLaunchKernel", "hipGetErrorName",
    "hipGetErrorString", "hipStreamGetCaptureInfo_v2", "hipUserObjectCreate", "hipGraphRetainUserObject",
    "hipThreadExchangeStreamCaptureMode",
)  # fmt: skip
"""As the library exports them."""

OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "numbers in shared memory do not tie streams: interprocess events or the host do": (
        "hipStreamWaitValue64", "hipStreamWriteValue64", "hipHostGetDevicePointer", "hipLaunchHostFunc",
    ),
    "interprocess events do not tie streams: numbers in shared memory or the host do": (
        "hipIpcGetEventHandle", "hipIpcOpenEventHandle",
    ),
    "handles of memory (hip_ipc) cannot be mapped: descriptors can": (
        "hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipIpcCloseMemHandle", "hipPointerGetAttribute",
    ),
    "pools of clients (hip_pool) cannot be mapped: handles and descriptors can": (
        "hipMemPoolImportFromShareableHandle", "hipMemPoolImportPointer", "hipMemPoolGetAccess", "hipMemPoolSetAccess",
    ),
    "descriptors of memory (fd) cannot be mapped: handles can": (
        "hipMemImportFromShareableHandle", "hipMemGetAllocationPropertiesFromHandle", "hipMemGetAllocationGranularity",
        "hipMemRelease", "hipMemAddressReserve", "hipMemAddressFree", "hipMemMap", "hipMemUnmap", "hipMemSetAccess",
    ),
}  # fmt: skip
"""Abilities that are lost without some functions, and those that stay."""


def lacking(maps: Path = _MAPS) -> tuple[str, ...]:
    """Functions that the runtime in this process has not; empty if none is loaded, or it cannot be looked into."""
    try:
        paths = {line.split(None, 5)[-1].strip() for line in maps.read_text().splitlines() if _LIBRARY in line}
        libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    except OSError:
        return ()
    names = (*REQUIRED, *(name for group in OPTIONAL.values() for name in group))
    return tuple(name for name in names if libraries and not any(hasattr(library, name) for library in libraries))


def spared(absent: Collection[str]) -> list[str]:
    """Abilities that are lost without these functions, a sentence each."""
    texts = []
    for text, names in OPTIONAL.items():
        if missing := [name for name in names if name in absent]:
            texts.append(f"the runtime has no {', '.join(missing)}: {text}")
    return texts


class Without:
    """``hip.hip`` over a runtime that lacks some functions: they answer that they are not supported."""

    def __init__(self, raw: Any, absent: Iterable[str]) -> None:
        self._raw = raw
        self._absent = frozenset(absent)

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            return lambda *_: (self._raw.hipError_t.hipErrorNotSupported,)
        return getattr(self._raw, name)
