"""Registries: which kernels there are, under keys that no two of them share.

One rule decides whenever a key is taken, in ``register`` and ``register_set`` alike: **a higher priority replaces, an
equal or lower one keeps what is there.** Iteration is by priority, highest first, and then by order of registration.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import KernelKey
from tilewright_kit.kernel_sets.registry_json import Record, registry_to_dict

__all__ = ["Entry", "Outcome", "Priority", "RegistrationReport", "Registry"]


class Priority(IntEnum):
    LOW = 0
    NORMAL = 1
    HIGH = 2


class Outcome(str, Enum):
    """The outcome of a registration."""

    ADDED = "added"
    REPLACED = "replaced"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel in a registry. ``origin`` says who registered it."""

    key: KernelKey
    config: KernelConfig
    priority: Priority = Priority.NORMAL
    origin: str = ""

    @property
    def arch(self) -> str:
        return self.key.arch

    @property
    def name(self) -> str:
        return self.key.name


@dataclass(frozen=True, slots=True)
class RegistrationReport:
    """Keys that came in anew, that replaced one of lower priority, and that gave way to what was there."""

    added: tuple[KernelKey, ...] = ()
    replaced: tuple[KernelKey, ...] = ()
    kept: tuple[KernelKey, ...] = ()


class Registry:
    """A thread-safe set of kernels. See the module for the rule on taken keys and for the order."""

    def __init__(self, name: str = "default") -> None:
        self.name = name
        self._lock = threading.RLock()
        self._entries: dict[KernelKey, tuple[int, Entry]] = {}
        self._count = 0

    # Registering

    def register(
        self,
        config: KernelConfig,
        arch: ArchSpec | str,
        priority: Priority = Priority.NORMAL,
        origin: str = "",
    ) -> Outcome:
        """Register one kernel for an arch."""
        report = self.register_set([config], arch, priority, origin)
        return Outcome.ADDED if report.added else Outcome.REPLACED if report.replaced else Outcome.KEPT

    def register_set(
        self,
        configs: Iterable[KernelConfig],
        arch: ArchSpec | str,
        priority: Priority = Priority.NORMAL,
        origin: str = "",
    ) -> RegistrationReport:
        """Register several kernels for an arch, in order; either all of them are seen by others or none."""
        return self._add(Entry(config.key(_arch_id(arch)), config, Priority(priority), origin) for config in configs)

    def _add(self, entries: Iterable[Entry]) -> RegistrationReport:
        batch = tuple(entries)  # whatever fails in making them fails before anything has changed
        outcomes: dict[Outcome, list[KernelKey]] = {outcome: [] for outcome in Outcome}
        with self._lock:
            for entry in batch:
                outcomes[self._put(entry)].append(entry.key)
        return RegistrationReport(*(tuple(outcomes[outcome]) for outcome in Outcome))

    def _put(self, entry: Entry) -> Outcome:
        there = self._entries.get(entry.key)
        if there is not None and entry.priority <= there[1].priority:
            return Outcome.KEPT
        self._count += 1
        self._entries[entry.key] = (self._count, entry)
        return Outcome.ADDED if there is None else Outcome.REPLACED

    # Reading

    def __iter__(self) -> Iterator[Entry]:
        """The entries as they are now: later changes do not disturb the iteration."""
        with self._lock:
            numbered = list(self._entries.values())
        numbered.sort(key=lambda item: (-item[1].priority, item[0]))
        return iter([entry for _, entry in numbered])

    def __len__(self) -> int:
        return len(self._entries)

    # Export

    def to_dict(self, now: datetime | None = None) -> dict[str, Any]:
        """The registry as a JSON document; see ``registry_json`` for its schema."""
        records = [Record(entry.key, entry.config, entry.priority.name.lower(), entry.origin) for entry in self]
        return registry_to_dict(self.name, records, now)


def _arch_id(arch: ArchSpec | str) -> str:
    return arch if isinstance(arch, str) else arch.id
