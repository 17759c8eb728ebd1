"""Errors of every kind of device in one wording."""

from __future__ import annotations

from tilewright_kit.types.errors import DeviceError, InvalidArgumentError
from tilewright_server.devices.contract import IPC_KINDS, POOL_KINDS, MemoryHandle

__all__ = ["check_copy", "check_handle", "check_size", "closed", "not_a_buffer", "unloaded"]


def closed() -> DeviceError:
    """For every use of a device that was closed."""
    return DeviceError("the device is closed", rule="device_closed", fix="use another server")


def not_a_buffer() -> DeviceError:
    """For a buffer that is not, or not any more."""
    return DeviceError(
        "the buffer was freed before, or is not of this device", rule="device_memory", fix="free each buffer once"
    )


def unloaded() -> DeviceError:
    """For an entry point whose module was unloaded."""
    return DeviceError(
        "the kernel was unloaded",
        rule="module_unloaded",
        fix="keep a module loaded for as long as its functions are used",
    )


def check_size(nbytes: int) -> None:
    """``InvalidArgumentError`` for a size that no buffer can have."""
    if nbytes < 0:
        raise InvalidArgumentError(
            "a buffer cannot have a negative size",
            field="bytes",
            value=nbytes,
            rule="buffer_size",
            fix="ask for one byte or more",
        )


def check_copy(offset: int, nbytes: int, size: int) -> None:
    """``InvalidArgumentError`` unless ``nbytes`` bytes from ``offset`` lie in a buffer of ``size`` bytes."""
    if offset < 0 or offset > size - nbytes:
        raise InvalidArgumentError(
            "the copy reaches past the end of the buffer",
            field="offset",
            value=offset,
            rule="buffer_bounds",
            fix=f"stay within {size} bytes",
        )


HANDLE_BYTES = 64
"""Bytes of an allocation's legacy handle, and of a pointer that was exported from a pool."""


def check_handle(handle: MemoryHandle) -> None:
    """``InvalidArgumentError`` for a handle whose size is not that of its kind."""
    if handle.kind in (*IPC_KINDS, *POOL_KINDS) and len(handle.data) != HANDLE_BYTES:
        raise InvalidArgumentError(
            f"a handle of this kind has {HANDLE_BYTES} bytes",
            field="handle" if handle.kind in IPC_KINDS else "pointer",
            value=len(handle.data),
            rule="handle_size",
            fix="send it as the driver gave it",
        )
