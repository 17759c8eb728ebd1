"""The names of the CUDA driver's results, by what they mean."""

from __future__ import annotations

from tilewright_server.devices.gpu.results import Results

__all__ = ["LOST", "RESULTS", "UNUSABLE"]

LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "CONTAINED",
        "MPS_CLIENT_TERMINATED",
        "EXTERNAL_DEVICE",
    )
)
"""Results after which every call of the process on that context fails: only a new process can use the device again.
CUDA driver API, ``CUresult``: "This leaves the process in an inconsistent state"."""

UNUSABLE = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "NOT_INITIALIZED",
        "STUB_LIBRARY",
        "DEVICE_UNAVAILABLE",
        "NO_DEVICE",
        "INVALID_DEVICE",
        "DEVICE_NOT_LICENSED",
        "OPERATING_SYSTEM",
        "SYSTEM_NOT_READY",
        "SYSTEM_DRIVER_MISMATCH",
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "INSUFFICIENT_DRIVER",
    )
)
"""Results that say that the device cannot be opened now."""

_REASONS = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel used an address that is not mapped",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used a misaligned address",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel ran an illegal instruction",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the driver allows",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel faulted",
    "CUDA_ERROR_ASSERT": "a kernel ended itself",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory had an error that cannot be corrected",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "a link between devices had an error that cannot be corrected",
}


_STALE = (
    "INVALID_VALUE",
    "INVALID_HANDLE",
    "INVALID_RESOURCE_TYPE",
    "NOT_FOUND",
    "FILE_NOT_FOUND",
    "ALREADY_MAPPED",
    "NOT_MAPPED",
    "OPERATING_SYSTEM",
)

RESULTS = Results(
    lost=LOST,
    unusable=UNUSABLE,
    full="CUDA_ERROR_OUT_OF_MEMORY",
    busy="CUDA_ERROR_NOT_READY",
    unknown="CUDA_ERROR_UNKNOWN",
    missing="CUDA_ERROR_NOT_FOUND",
    reasons=_REASONS,
    imports={
        **{f"CUDA_ERROR_{name}": "stale" for name in _STALE},
        "CUDA_ERROR_INVALID_CONTEXT": "own",
        "CUDA_ERROR_MAP_FAILED": "mapping",
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "device",
        "CUDA_ERROR_INVALID_DEVICE": "device",
        "CUDA_ERROR_TOO_MANY_PEERS": "peers",
        "CUDA_ERROR_NOT_SUPPORTED": "unsupported",
        "CUDA_ERROR_NOT_PERMITTED": "forbidden",
    },
    rule="cuda_driver",
    look="nvidia-smi",
)
