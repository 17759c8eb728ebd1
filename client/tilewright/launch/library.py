"""Binding of libtilewright (``tilewright.h``), which launches plans in this process."""

from __future__ import annotations

import ctypes
import os
import threading
from copy import copy
from ctypes import POINTER, byref, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from tilewright.errors import (
    DeviceError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
    UnsupportedError,
)
from tilewright_native import library_path

__all__ = ["CPU", "NO_CONTEXT", "UNSUPPORTED", "Library", "PlanInfo", "load_library"]

ABI = 1
CPU, CUDA, HIP = 1, 2, 3
NO_CONTEXT = 9
"""The status of a launch in a thread without a context."""
UNSUPPORTED = 16
_MISALIGNED, _DRIVER = 13, 10
_KINDS: dict[int, type[TilewrightError]] = {
    1: InvalidArgumentError,
    2: InternalError,
    3: UnsupportedError,
    4: InternalError,
    5: InternalError,
    6: UnsupportedError,
    7: UnsupportedError,
    8: UnavailableError,
    NO_CONTEXT: UnavailableError,
    _DRIVER: DeviceError,
    11: ResourceExhaustedError,
    12: InvalidArgumentError,
    _MISALIGNED: InvalidArgumentError,
    14: InvalidArgumentError,
    15: InvalidArgumentError,
    UNSUPPORTED: UnsupportedError,
    17: UnsupportedError,
    18: NotFoundError,
}
"""Errors by ``tw_status``."""


class PlanInfo(ctypes.Structure):
    """``tw_plan_info``."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("device_kind", c_int32),
        ("operands", c_uint32),
        ("stages", c_uint32),
        ("objects", c_uint32),
        ("team", c_uint32),
        ("workspace_bytes", c_uint64),
        ("flops", c_uint64),
        ("operation", c_char_p),
        ("arch", c_char_p),
        ("name", c_char_p),
    )


class OperandInfo(ctypes.Structure):
    """``tw_operand_info``."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("role", c_int32),
        ("rank", c_uint32),
        ("alignment", c_uint32),
        ("span_bytes", c_uint64),
        ("name", c_char_p),
        ("dtype", c_char_p),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
    )


class _Error(ctypes.Structure):
    """``tw_error``."""

    _fields_ = (
        ("status", c_int32),
        ("operand", c_int32),
        ("value", c_int64),
        ("rule", c_char * 32),
        ("message", c_char * 256),
        ("fix", c_char * 192),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "tw_object_put": (c_char_p, c_char_p, c_size_t),
    "tw_object_put_fd": (c_char_p, c_int32, c_size_t),
    "tw_object_known": (c_char_p,),
    "tw_plan_open": (c_char_p, c_size_t, POINTER(c_void_p)),
    "tw_plan_describe": (c_void_p, POINTER(PlanInfo)),
    "tw_plan_operand": (c_void_p, c_uint32, POINTER(OperandInfo)),
    "tw_plan_load": (c_void_p,),
    "tw_plan_close": (c_void_p,),
    "tw_plan_record_into": (c_void_p, c_void_p),
    "tw_run": (c_void_p, c_char_p, c_uint32, c_void_p),
    "tw_bind": (c_void_p, c_char_p, c_uint32, c_void_p, POINTER(c_void_p)),
    "tw_launch": (c_void_p, c_void_p),
    "tw_launch_many": (c_void_p, c_uint32, c_void_p, POINTER(c_uint32)),
    "tw_binding_close": (c_void_p,),
    "tw_bundle_open": (c_char_p, POINTER(c_void_p)),
    "tw_bundle_close": (c_void_p,),
    "tw_bundle_count": (c_void_p,),
    "tw_bundle_entry": (c_void_p, c_uint32, POINTER(c_char_p), POINTER(c_char_p)),
    "tw_bundle_find": (c_void_p, c_char_p, POINTER(c_void_p)),
    "tw_bundle_verify": (c_void_p,),
    "tw_cpu_configure": (POINTER(c_int32), c_uint32),
    "tw_cpu_threads": (),
}


class Library:
    """Functions of the library. Those that are called by their C names return a status; ``error`` is what the last of
    them in this thread had to say.
    """

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` and ``AttributeError`` for what is no such library."""
        native = ctypes.CDLL(str(path))
        native.tw_abi_version.restype = c_uint32
        if native.tw_abi_version() != ABI:
            raise OSError(f"it has version {native.tw_abi_version()} of the interface, and this client uses {ABI}")
        for name, arguments in _SIGNATURES.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, c_int32
        native.tw_cpu_threads.restype = native.tw_bundle_count.restype = c_uint32
        native.tw_last_error.restype = POINTER(_Error)
        self._native = native
        self.tw_run = native.tw_run
        self.tw_launch = native.tw_launch
        self.tw_launch_many = native.tw_launch_many
        self.close_plan = native.tw_plan_close
        self.close_binding = native.tw_binding_close
        self.close_bundle = native.tw_bundle_close
        self._recent: dict[bytes, None] = {}
        self._configure()

    def _configure(self) -> None:
        """Give the pool one hardware thread of every core before it gets two of any: plans are made for cores."""
        cpus = _cores_first(sorted(os.sched_getaffinity(0)))
        # Refused once the pool has started, which is for others to know.
        self._native.tw_cpu_configure((c_int32 * len(cpus))(*cpus), len(cpus))

    def error(self, names: tuple[str, ...] = (), field: str = "launch") -> TilewrightError:
        """The error of the call that failed last in this thread. ``names`` are those of the plan's operands, ``field``
        what is at fault where it is none of them.
        """
        found = self._native.tw_last_error().contents
        rule, message, fix = (part.decode("utf-8", "replace") for part in (found.rule, found.message, found.fix))
        if 0 <= found.operand < len(names):
            field = names[found.operand]
        value: object = found.value or ""
        if found.status == _MISALIGNED:
            fix = f"prepare with the attribute alignment={found.value}, or align the tensor"
        kind = _KINDS.get(found.status, InternalError)
        if field == "bundle" and kind is InternalError:  # bytes that the caller gave
            kind = InvalidArgumentError
        return kind(message or "the launch failed", field=field, value=value, rule=rule, fix=fix)

    @property
    def threads(self) -> int:
        """Threads of the pool that CPU plans run on."""
        return int(self._native.tw_cpu_threads())

    # ---- code objects ----

    def recent_objects(self) -> list[bytes]:
        """Hashes of code objects that were given lately: enough for the plans that come now."""
        return list(self._recent)[-_RECENT:]

    def knows(self, sha256: bytes) -> bool:
        return bool(self._native.tw_object_known(sha256))

    def put_object(self, sha256: bytes, content: bytes) -> None:
        """Raises ``InternalError`` for bytes that have another hash."""
        self._check(self._native.tw_object_put(sha256, content, len(content)))
        self._note(sha256)

    def put_object_file(self, sha256: bytes, fd: int, nbytes: int) -> None:
        """The same for the content of a file, whose descriptor stays the caller's."""
        self._check(self._native.tw_object_put_fd(sha256, fd, nbytes))
        self._note(sha256)

    def _note(self, sha256: bytes) -> None:
        self._recent.pop(sha256, None)
        self._recent[sha256] = None
        if len(self._recent) > 4 * _RECENT:
            self._recent = dict.fromkeys(self.recent_objects())

    # ---- plans ----

    def open_plan(self, data: bytes) -> int:
        handle = c_void_p()
        self._check(self._native.tw_plan_open(data, len(data), byref(handle)))
        return handle.value or 0

    def describe(self, plan: int) -> PlanInfo:
        info = PlanInfo(struct_bytes=ctypes.sizeof(PlanInfo))
        self._check(self._native.tw_plan_describe(plan, byref(info)))
        return info

    def operand(self, plan: int, index: int) -> OperandInfo:
        info = OperandInfo(struct_bytes=ctypes.sizeof(OperandInfo))
        self._check(self._native.tw_plan_operand(plan, index, byref(info)))
        return info

    def load_plan(self, plan: int) -> None:
        self._check(self._native.tw_plan_load(plan))

    def record_into(self, plan: int, address: int | None) -> None:
        """Count launches of a plan into a ``tw_launch_record``; ``None`` stops it."""
        self._check(self._native.tw_plan_record_into(plan, address))

    def bind(self, plan: int, addresses: bytes, count: int) -> tuple[int, int]:
        """Status and handle of a binding."""
        handle = c_void_p()
        status = self._native.tw_bind(plan, addresses, count, None, byref(handle))
        return status, handle.value or 0

    # ---- bundles ----

    def open_bundle(self, path: Path) -> int:
        """Raises ``NotFoundError``, ``InvalidArgumentError`` for what is no bundle, ``UnsupportedError`` for another
        version.
        """
        handle = c_void_p()
        self._check(self._native.tw_bundle_open(os.fsencode(path), byref(handle)), "bundle")
        return handle.value or 0

    def bundle_entries(self, bundle: int) -> list[tuple[str, str]]:
        """Names and architectures of its plans."""
        found = []
        for index in range(self._native.tw_bundle_count(bundle)):
            name, arch = c_char_p(), c_char_p()
            self._check(self._native.tw_bundle_entry(bundle, index, byref(name), byref(arch)), "bundle")
            found.append((os.fsdecode(name.value or b""), os.fsdecode(arch.value or b"")))
        return found

    def find_in_bundle(self, bundle: int, name: str) -> int:
        """The plan of that name for this machine. Raises ``NotFoundError``, ``UnsupportedError``."""
        handle = c_void_p()
        self._check(self._native.tw_bundle_find(bundle, os.fsencode(name), byref(handle)), "bundle")
        return handle.value or 0

    def verify_bundle(self, bundle: int) -> None:
        """Raises ``InvalidArgumentError`` if a digest is wrong."""
        self._check(self._native.tw_bundle_verify(bundle), "bundle")

    def _check(self, status: int, field: str = "launch") -> None:
        if status:
            raise self.error(field=field)


_RECENT = 64
_lock = threading.Lock()
_found: Library | TilewrightError | None = None


def load_library() -> Library:
    """The library of this process, loaded once. Raises ``UnavailableError`` where there is none."""
    global _found
    if _found is None:
        with _lock:
            if _found is None:
                _found = _load()
    if isinstance(_found, TilewrightError):
        raise copy(_found)  # what is raised holds on to everything that its callers have
    return _found


def _load() -> Library | TilewrightError:
    try:
        return Library(library_path())
    except (OSError, AttributeError, RuntimeError) as error:
        return UnavailableError(
            f"libtilewright cannot be loaded: {error}",
            field="launch",
            value="caller",
            rule="launch_library",
            fix='install a wheel that has it, or launch in the server: launch="server"',
        )


def _cores_first(cpus: list[int]) -> list[int]:
    seen: set[str] = set()
    first: list[int] = []
    for cpu in cpus:
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("ascii")
        except OSError:
            core = str(cpu)
        if core not in seen:
            seen.add(core)
            first.append(cpu)
    return [*first, *(cpu for cpu in cpus if cpu not in first)]


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
