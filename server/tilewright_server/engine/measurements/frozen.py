"""The strategy ``frozen``: once a problem has a kernel it keeps it, whatever is measured later."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.strategies import Ranked, Strategy
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError, UnavailableError

__all__ = ["Frozen", "SelectionLock"]

FORMAT = 1
Key = tuple[str, str, str, str]
"""Operation, arch, name of the device, and the problem as canonical JSON."""


class SelectionLock:
    """A file of choices, one JSON object a line: ``format``, ``operation``, ``arch``, ``device``, ``problem``,
    ``kernel`` and ``config``. Lines are only ever added, under a lock of the file, so that servers can share it and
    it can be copied to other machines of the same devices. Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[Key, list[dict[str, Any]]] = {}
        self._read = 0
        self._inode = -1

    def choices(self, key: Key) -> list[dict[str, Any]]:
        """Configurations that are held for ``key``, the first that was chosen first.

        Raises ``InvalidArgumentError`` for a line that is none of these records, ``UnavailableError`` if the file
        cannot be read.
        """
        with self._lock, self._reported():
            try:
                with self.path.open("rb") as file:
                    self._update(file)
            except FileNotFoundError:
                return []
            return list(self._known.get(key, ()))

    def hold(self, key: Key, config: KernelConfig) -> list[dict[str, Any]]:
        """Add a choice, unless another server has added the same meanwhile, and return all that are held for ``key``.

        Raises as ``choices`` does, and ``UnavailableError`` if the file cannot be written: then nothing is added.
        """
        with self._lock, self._reported():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._update(file)
                chosen = config.to_dict()
                if chosen not in self._known.get(key, ()):
                    os.ftruncate(file.fileno(), self._read)  # the beginning of a line whose writer has died
                    try:
                        file.write(_line(key, config))
                        file.flush()
                        os.fsync(file.fileno())
                    except OSError:
                        os.ftruncate(file.fileno(), self._read)  # half a line would be damage
                        raise
                    self._update(file)
            return list(self._known.get(key, ()))

    def _update(self, file: Any) -> None:
        """Read what was added to the file since it was last read; all of another file."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._read:
            self._known, self._read, self._inode = {}, 0, status.st_ino
        if status.st_size == self._read:
            return
        file.seek(self._read)
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the rest is being written
        found: dict[Key, list[dict[str, Any]]] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            if line.strip():
                key, config = self._parsed(line, number)
                found.setdefault(key, []).append(config)
        for key, configs in found.items():
            self._known.setdefault(key, []).extend(configs)
        self._read += len(whole)

    def _parsed(self, line: bytes, number: int) -> tuple[Key, dict[str, Any]]:
        try:
            record = json.loads(line)
            if record["format"] != FORMAT or not isinstance(record["config"], dict):
                raise ValueError
            problem = json.dumps(record["problem"], sort_keys=True)
            return (str(record["operation"]), str(record["arch"]), str(record["device"]), problem), record["config"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidArgumentError(
                f"{self.path} has a line that is no choice of a kernel (line {number} of those read last)",
                field="selection_lock",
                value=line[:80].decode("utf-8", "replace"),
                rule="selection_lock",
                fix="restore the file, or remove the line: its problem is then chosen for again",
            ) from None

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(
                f"choices of kernels cannot be kept: {error.strerror}",
                field="selection_lock",
                value=str(self.path),
                rule="selection_lock",
                fix="make the file readable and writable for the server, free space, or use another strategy",
            ) from error


class Frozen:
    """The kernel that the lock file holds for a problem on this device; without one, the choice of another strategy,
    which is then held.

    One kernel is proposed and no other, so that nothing else runs while it is built. Raises what the other strategy
    raises, and what the file raises: a choice that cannot be kept is not made in silence.
    """

    name = "frozen"

    def __init__(self, lock: SelectionLock, chooser: Strategy) -> None:
        self._lock = lock
        self._chooser = chooser

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        key = _key(operation, problem, device)
        held = _fitting(self._lock.choices(key), operation, problem, device)
        if held is None:
            ranked = self._chooser.rank(operation, problem, candidates, device)
            if not ranked:
                return ranked
            # Another server may have been first.
            held = _fitting(self._lock.hold(key, ranked[0].config), operation, problem, device)
            assert held is not None, "the choice of a strategy fits"
        return [Ranked(held, f"held by {self._lock.path}")]


def _key(operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> Key:
    described = json.dumps(problem.describe(), sort_keys=True, default=str)
    return operation.name, device.arch.id, device.name, described


def _line(key: Key, config: KernelConfig) -> bytes:
    operation, arch, device, problem = key
    record = {
        "format": FORMAT,
        "operation": operation,
        "arch": arch,
        "device": device,
        "problem": json.loads(problem),
        "kernel": config.name,
        "config": config.to_dict(),
    }
    return json.dumps(record, sort_keys=True).encode() + b"\n"


def _fitting(
    held: Sequence[dict[str, Any]], operation: Operation[Any, Any], problem: Problem, device: DeviceInfo
) -> KernelConfig | None:
    """The first of the held kernels that can compute the problem. Operands of one description may lie differently."""
    for record in held:
        try:
            config: KernelConfig = operation.config_type.from_dict(record)
        except TilewrightError:
            continue  # of another version of the plugin
        if operation.rules.allows(config, device.arch) and not operation.mismatches(problem, config, device):
            return config
    return None
