"""Registries: which kernels there are, under keys that no two of them share.

One rule decides whenever a key is taken, in ``register``, ``register_set`` and ``merge`` alike: **a
higher priority replaces, an equal or lower one keeps what is there.** Iteration is by priority, highest first, and
then by order of registration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import KernelKey
from tilewright_kit.kernel_sets.registry_json import Record, registry_to_dict
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError

__all__ = ["Entry", "MergeReport", "Outcome", "Priority", "Registry"]


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
class MergeReport:
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
        self._by_text: dict[str, KernelKey] = {}
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
    ) -> MergeReport:
        """Register several kernels for an arch, in order; either all of them are seen by others or none."""
        return self._add(Entry(config.key(_arch_id(arch)), config, Priority(priority), origin) for config in configs)

    def merge(self, other: Registry, priority: Priority | None = None) -> MergeReport:
        """Take over the kernels of ``other``, in its order, at their own priority or at the one given."""
        entries = tuple(other)
        return self._add(
            entry if priority is None else Entry(entry.key, entry.config, Priority(priority), entry.origin)
            for entry in entries
        )

    def remove(self, key: KernelKey) -> bool:
        """Forget a kernel; whether it was there."""
        with self._lock:
            there = self._entries.pop(key, None) is not None
            if there:
                del self._by_text[str(key)]
        return there

    def _add(self, entries: Iterable[Entry]) -> MergeReport:
        batch = tuple(entries)  # whatever fails in making them fails before anything has changed
        outcomes: dict[Outcome, list[KernelKey]] = {outcome: [] for outcome in Outcome}
        with self._lock:
            for entry in batch:
                outcomes[self._put(entry)].append(entry.key)
        return MergeReport(*(tuple(outcomes[outcome]) for outcome in Outcome))

    def _put(self, entry: Entry) -> Outcome:
        there = self._entries.get(entry.key)
        if there is not None and entry.priority <= there[1].priority:
            return Outcome.KEPT
        self._count += 1
        self._entries[entry.key] = (self._count, entry)
        self._by_text[str(entry.key)] = entry.key
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

    def __contains__(self, key: object) -> bool:
        return key in self._by_text if isinstance(key, str) else key in self._entries

    def lookup(self, key: KernelKey | str, arch: ArchSpec | str | None = None) -> Entry | None:
        """The kernel of that key, or that text of a key, or that name (on ``arch``, if given); None if there is none.

        Raises ``InvalidArgumentError`` for a name that several archs have when no arch is given.
        """
        with self._lock:
            if isinstance(key, KernelKey):
                found = self._entries.get(key)
                return None if found is None else found[1]
            if key in self._by_text:
                return self._entries[self._by_text[key]][1]
        wanted = None if arch is None else _arch_id(arch)
        named = [entry for entry in self if entry.name == key and wanted in (None, entry.arch)]
        if len(named) > 1:
            raise InvalidArgumentError(
                f"kernel {key} is registered for several archs",
                field="arch",
                value="",
                rule="registry_ambiguous",
                fix=f"name one of: {', '.join(sorted(entry.arch for entry in named))}",
            )
        return named[0] if named else None

    def require(self, key: KernelKey | str, arch: ArchSpec | str | None = None) -> Entry:
        """``lookup`` that raises ``NotFoundError``."""
        entry = self.lookup(key, arch)
        if entry is None:
            raise NotFoundError(f"registry {self.name!r} has no such kernel", field="kernel", value=str(key))
        return entry

    def filter(self, predicate: Callable[[Entry], bool]) -> Registry:
        """A new registry with the entries for which ``predicate`` holds, in the same order."""
        chosen = Registry(self.name)
        chosen._add(entry for entry in self if predicate(entry))
        return chosen

    # Export

    def to_dict(self, now: datetime | None = None) -> dict[str, Any]:
        """The registry as a JSON document; see ``registry_json`` for its schema."""
        records = [Record(entry.key, entry.config, entry.priority.name.lower(), entry.origin) for entry in self]
        return registry_to_dict(self.name, records, now)


def _arch_id(arch: ArchSpec | str) -> str:
    return arch if isinstance(arch, str) else arch.id
