"""What the driver answers, as typed errors. Knows names of result codes only, so that it needs no driver."""

from __future__ import annotations

from tilewright_kit.errors import DeviceError, ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.devices.base import DeviceLostError

__all__ = ["LOST", "UNUSABLE", "error_of", "lost_error"]

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


def lost_error(name: str, device: str = "") -> DeviceLostError:
    """The error for a result by name that ends the use of a device."""
    return DeviceLostError(f"{_REASONS.get(name, 'the device failed')} ({name})", device=device)


def error_of(name: str, device: str = "", doing: str = "") -> TilewrightError:
    """The error for a result code by name. ``doing`` completes "the driver refused ..." for what is no common fault."""
    if name in LOST:
        return lost_error(name, device)
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return ResourceExhaustedError(
            "the device has not enough memory left",
            field="device",
            value=device,
            rule="device_memory",
            fix="free buffers or regions, end other users of the device, or ask for less",
            retry_after_s=1.0,
        )
    if name in UNUSABLE:
        return UnavailableError(
            f"the device cannot be used at the moment ({name})",
            field="device",
            value=device,
            rule="device_driver",
            fix="look at `tilewright doctor` and `nvidia-smi` on the server's machine",
            retry_after_s=5.0,
        )
    return DeviceError(
        f"the driver refused {doing or 'a request'} ({name})",
        field="driver",
        value=name,
        rule="cuda_driver",
        fix="report it as a fault of the server or of the operation's plugin, with the request",
    )
