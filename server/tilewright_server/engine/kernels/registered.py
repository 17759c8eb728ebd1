"""Kernels that callers declared: configurations that can be named, listed and built like those of the kernel sets.

A name stands for one configuration, since it is a function of all fields. So it does not matter who declared it, and
whoever knows a name may use it; only lists tell the kernels of one session from those of all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import alias_of
from tilewright_kit.contract.operation import Operation
from tilewright_kit.types.errors import InvalidArgumentError, ResourceExhaustedError, TilewrightError
from tilewright_server.clients.refusals import over_session_quota
from tilewright_server.engine.types import RegisteredLimits

__all__ = ["REGISTERED", "Owner", "RegisteredKernels"]

log = logging.getLogger(__name__)

REGISTERED = "registered"
"""Name of the kernel set of all registered kernels, and of the folder of the shared ones."""
_RETRY_S = 1.0
_MAX_FILE = 64 * 1024

Place = tuple[str, str]
"""Operation and name."""
Owner = tuple[str, str]
"""Principal and process."""


class RegisteredKernels:
    """Thread-safe. Shared kernels are files, one each, which all servers with this cache see at once."""

    def __init__(
        self, cache_dir: Path, operations: Mapping[str, Operation[Any, Any]], limits: RegisteredLimits | None = None
    ) -> None:
        self._folder = cache_dir / REGISTERED
        self._operations = operations
        self._limits = limits or RegisteredLimits()
        self._own: dict[bytes, dict[Place, KernelConfig]] = {}
        self._owners: dict[bytes, Owner] = {}
        self._writers: dict[str, Owner] = {}
        """Kernels by files that this server was asked for."""
        self._files: dict[str, tuple[int, KernelConfig | None]] = {}
        self._lock = threading.Lock()

    def opened(self, session: bytes, owner: Owner = ("", "")) -> bool:
        """Begin to keep kernels of a session, until ``forget``; false if that has begun already."""
        with self._lock:
            known = session in self._own
            self._own.setdefault(session, {})
            self._owners.setdefault(session, owner)
            return not known

    def add(self, config: KernelConfig, session: bytes = b"", owner: Owner = ("", "")) -> None:
        """Register for a session, or for all. Registering again changes nothing. Raises ``ResourceExhaustedError``."""
        if session:
            with self._lock:
                own = self._own.get(session, {})
                if _place(config) not in own:
                    if len(own) >= self._limits.session:
                        raise _full_session(self._limits.session, len(own))
                    mine = sum(len(self._own[each]) for each, known in self._owners.items() if known == owner)
                    total = sum(map(len, self._own.values()))
                    _require_room("registered_kernels", mine, total, self._limits.sessions)
                own[_place(config)] = config
        else:
            self._write(config, owner)

    def remove(self, operation: str, name: str, session: bytes = b"", *, shared: bool = True) -> bool:
        """Forget a kernel of the session, or else a ``shared`` one; false if there was none."""
        with self._lock:
            if self._own.get(session, {}).pop((operation, name), None) is not None:
                return True
        if not shared:
            return False
        try:
            (self._folder / _file_name((operation, name))).unlink()
        except OSError:
            return False
        return True

    def forget(self, session: bytes) -> None:
        """Forget what a session registered for itself."""
        with self._lock:
            self._own.pop(session, None)
            self._owners.pop(session, None)

    def find(self, operation: str, name: str) -> KernelConfig | None:
        """A registered kernel by name or alias, whoever registered it."""
        if name.startswith("@"):
            with self._lock:
                own = [config for kernels in self._own.values() for config in kernels.values()]
            known = (item for item in (*self._shared(), *own) if item.operation == operation)
            return next((item for item in known if alias_of(item.name) == name), None)
        place = (operation, name)
        found = self._read(_file_name(place))
        if found is not None and _place(found) == place:
            return found
        with self._lock:
            return next((own[place] for own in self._own.values() if place in own), None)

    def of(self, operation: str, session: bytes = b"") -> list[KernelConfig]:
        """Shared kernels of an operation, by name, and then those of the session."""
        shared = sorted((item for item in self._shared() if item.operation == operation), key=lambda item: item.name)
        with self._lock:
            own = [item for item in self._own.get(session, {}).values() if item.operation == operation]
        return list(dict.fromkeys([*shared, *own]))

    def _shared(self) -> Iterator[KernelConfig]:
        try:
            names = sorted(path.name for path in self._folder.glob("*.json"))
        except OSError:
            names = []
        with self._lock:
            for gone in self._files.keys() - set(names):
                del self._files[gone]
        for name in names[: self._limits.shared]:
            if (config := self._read(name)) is not None:
                yield config

    def _read(self, name: str) -> KernelConfig | None:
        """The configuration of a file; None if there is none, or it is not what ``_write`` wrote."""
        path = self._folder / name
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return None
        with self._lock:
            known = self._files.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        config = self._parsed(path)
        with self._lock:
            self._files[name] = (stamp, config)
        return config

    def _parsed(self, path: Path) -> KernelConfig | None:
        try:
            if not path.is_file() or path.stat().st_size > _MAX_FILE:  # who reads a pipe waits for who writes
                raise ValueError("no file, or too large")
            record = json.loads(path.read_text("utf-8"))
            operation = self._operations.get(record["operation"])
            if operation is None:  # its plugin is not loaded
                return None
            config: KernelConfig = operation.config_type.from_dict(record["config"])
            if config.name != record["name"]:
                raise ValueError("the name is another configuration's")
        except (OSError, ValueError, KeyError, TypeError, RecursionError, TilewrightError) as error:
            log.warning("a registered kernel is left out: %s: %s", path.name, error)
            return None
        return config

    def _write(self, config: KernelConfig, owner: Owner) -> None:
        name = _file_name(_place(config))
        record = {"operation": config.operation, "name": config.name, "config": config.to_dict()}
        text = json.dumps(record, indent=1)
        if len(text) > _MAX_FILE:
            raise InvalidArgumentError(
                "the configuration is too large to be kept", field="config", rule="registered_size", fix="shorten it"
            )
        scratch = self._folder / f".{secrets.token_hex(8)}.tmp"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            known = {path.name for path in self._folder.iterdir()}
            if name not in known:
                if len(known) >= self._limits.shared:
                    raise _full_cache(self._limits.shared, len(known))
                with self._lock:
                    for gone in self._writers.keys() - known:
                        del self._writers[gone]
                    mine = sum(1 for writer in self._writers.values() if writer == owner)
                _require_room("shared_kernels", mine, len(known), self._limits.shared)
            scratch.write_text(text, "utf-8")
            scratch.replace(self._folder / name)
            with self._lock:
                self._writers.setdefault(name, owner)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink()
            raise ResourceExhaustedError(
                f"the kernel cannot be kept: {error.strerror}",
                field="config",
                rule="registered_write",
                fix="free space in the cache directory, or register it for this session only",
            ) from None


def _place(config: KernelConfig) -> Place:
    return config.operation, config.name


def _file_name(place: Place) -> str:
    return hashlib.sha256("\0".join(place).encode("utf-8", "replace")).hexdigest()[:40] + ".json"


def _full_session(limit: int, held: int) -> ResourceExhaustedError:
    reason = f"a session keeps {limit} registered kernels at the most, and this one has {held}"
    return over_session_quota("max_registered_kernels", limit, reason, "unregister some")


def _full_cache(limit: int, held: int) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"a cache keeps {limit} registered kernels at the most, and this one has {held}",
        field="shared_kernels",
        value=limit,
        rule="quota",
        fix="unregister some",
        retry_after_s=_RETRY_S,
    )


def _require_room(quota: str, mine: int, total: int, limit: int) -> None:
    """Raise ``ResourceExhaustedError`` if a process that registered so many leaves fewer to others."""
    if mine >= limit - total:
        raise ResourceExhaustedError(
            f"{total} kernels are registered already, {mine} of them by this client's process",
            field=quota,
            value=limit,
            rule="quota",
            fix="unregister some, or close sessions that are no longer used",
            retry_after_s=_RETRY_S,
        )
