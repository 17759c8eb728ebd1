"""The catalog of kernels: the sets that operations declare, and whether each kernel is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import alias_of
from tilewright_kit.contract.operation import Operation
from tilewright_kit.types.errors import NotFoundError, TilewrightError
from tilewright_server.build.cache.artifacts import LOG, ArtifactCache
from tilewright_server.engine.kernels.names import Catalogs, close_kernels, close_names
from tilewright_server.engine.kernels.registered import REGISTERED, RegisteredKernels
from tilewright_server.engine.kernels.store import KernelStore
from tilewright_server.engine.lru import Lru

__all__ = ["Kernel", "KernelCatalog", "KernelDetail"]

_SETS = 32
"""Sets of kernels, each of one arch, that are remembered."""


def _nothing() -> None:
    """Do nothing between two steps of long work."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One line of a list."""

    config: KernelConfig
    key: str
    """Text of the kernel's key."""
    arch: str
    built: bool
    registered: bool = False
    """Declared by a caller."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def operation(self) -> str:
        return self.config.operation


@dataclass(frozen=True, slots=True)
class KernelDetail:
    kernel: Kernel
    source: str
    """Empty if this arch has no template yet."""
    log: str
    """Log of the compiler; empty if the kernel is not built here."""


class KernelCatalog:
    """Reads the kernel sets of all operations. Empty filters do not narrow; an empty arch is the default device's."""

    def __init__(
        self,
        catalogs: Catalogs,
        store: KernelStore,
        registered: RegisteredKernels,
        cache: ArtifactCache,
        default_arch: Callable[[], ArchSpec],
    ) -> None:
        self._catalogs = catalogs
        self._store = store
        self._registered = registered
        self._cache = cache
        self._default_arch = default_arch
        self._sets: Lru[tuple[str, str, ArchSpec], tuple[KernelConfig, ...]] = Lru(_SETS)

    def arch(self, name: str = "") -> ArchSpec:
        """An arch by id, with the machine's own figures if it is the default device's. Raises ``NotFoundError``."""
        default = self._default_arch() if not name else None
        if default is not None:
            return default
        try:
            own = self._default_arch()
        except NotFoundError:  # a server without a device can still list and generate
            return self._catalogs.arch(name)
        return own if own.id == name else self._catalogs.arch(name)

    def kernel_sets(self, operation: str = "") -> list[str]:
        """Names of the sets, sorted."""
        return sorted({REGISTERED, *(name for item in self._chosen(operation) for name in item.kernel_sets)})

    def select(
        self,
        operation: str = "",
        kernel_set: str = "",
        arch: str = "",
        pattern: str = "",
        session: bytes = b"",
        *,
        pause: Callable[[], None] = _nothing,
    ) -> list[KernelConfig]:
        """Configurations that match, in declaration order, none twice; then those that were registered, by others than
        ``session`` for all. ``pattern`` is a shell pattern over names. ``pause`` is called again and again meanwhile.

        Raises ``NotFoundError`` for an unknown operation, set or arch.
        """
        return list(self._select(operation, kernel_set, self.arch(arch), pattern, session, pause))

    def list(
        self,
        operation: str = "",
        kernel_set: str = "",
        arch: str = "",
        pattern: str = "",
        session: bytes = b"",
        *,
        offset: int = 0,
        limit: int = 0,
    ) -> tuple[list[Kernel], int]:
        """A page of what matches (``limit`` 0: all of it), and how many there are in all."""
        spec = self.arch(arch)
        configs = list(self._select(operation, kernel_set, spec, pattern, session))
        page = configs[offset : offset + limit] if limit else configs[offset:]
        return [self.describe(config, spec) for config in page], len(configs)

    def find(self, operation: str, name: str, arch: str = "", *, pause: Callable[[], None] = _nothing) -> KernelConfig:
        """A configuration by name or alias: one that a plan or an explanation named, or one of the sets; of any
        operation if ``operation`` is empty. ``pause`` is called again and again meanwhile.

        Raises ``NotFoundError`` with close matches.
        """
        spec = self.arch(arch)
        for item in self._chosen(operation):
            known = self._store.named(item.name, name) or self._registered.find(item.name, name)
            if known is not None and item.rules.allows(known, spec):
                return known
        for item in self._likeliest(operation, name):
            for config in self._select(item.name, "", spec, "", pause=pause):
                if name == (alias_of(config.name) if name.startswith("@") else config.name):
                    return config
        close = close_kernels(name, (config.name for config in self._select(operation, "", spec, "")))
        raise NotFoundError(
            f"there is no kernel of that name for {spec.id}" + (f" in the operation {operation}" if operation else ""),
            field="name",
            value=name,
            rule="kernel_name",
            fix=f"use {close}" if close else "list the kernels",
        )

    def describe(self, config: KernelConfig, arch: ArchSpec) -> Kernel:
        try:
            built = self._store.is_built(self._store.unit(config, arch))
        except TilewrightError:  # no template for the arch, or no compiler here: then it is not built
            built = False
        registered = self._registered.find(config.operation, config.name) is not None
        return Kernel(config, str(config.key(arch.id)), arch.id, built, registered)

    def detail(self, operation: str, name: str, arch: str = "") -> KernelDetail:
        """A kernel with its source and, if it is built here, its build log. Raises ``NotFoundError``."""
        spec = self.arch(arch)
        config = self.find(operation, name, arch)
        try:
            source = self._store.source(config, spec).text
        except TilewrightError:
            source = ""
        return KernelDetail(self.describe(config, spec), source, self._log(config, spec))

    def source(self, config: KernelConfig, arch: ArchSpec) -> str:
        """The translation unit. Raises ``ConfigInvalidError`` or ``UnsupportedError``."""
        return self._store.source(config, arch).text

    def export(
        self, operation: str = "", kernel_set: str = "", arch: str = "", pattern: str = "", session: bytes = b""
    ) -> Mapping[str, Any]:
        """Matching kernels as the registry's JSON document."""
        spec = self.arch(arch)
        from tilewright_kit.kernel_sets.registry import Registry

        registry = Registry("tilewright")
        found = list(self._select(operation, kernel_set, spec, pattern, session))
        own = {item for each in self._chosen(operation) for item in self._registered.of(each.name, session)}
        registry.register_set((item for item in found if item not in own), spec, origin="declared")
        registry.register_set((item for item in found if item in own), spec, origin=REGISTERED)
        return registry.to_dict()

    def _log(self, config: KernelConfig, arch: ArchSpec) -> str:
        try:
            artifact = self._cache.get(self._store.unit(config, arch).key)
        except TilewrightError:
            return ""
        if artifact is None:
            return ""
        try:
            return (artifact.folder / LOG).read_text("utf-8", "replace")
        except OSError:
            return ""
        finally:
            artifact.release()

    def _chosen(self, operation: str) -> Sequence[Operation[Any, Any]]:
        """One operation, or all of them."""
        return [self._catalogs.operation(operation)] if operation else list(self._catalogs.operations.values())

    def _likeliest(self, operation: str, name: str) -> Sequence[Operation[Any, Any]]:
        """Those first whose kernels' names begin as this one does: sets of others take seconds to make."""

        def shared(item: Operation[Any, Any]) -> int:
            words = item.config_type.prefix or item.config_type.operation
            return len(words) if name.startswith(f"{words}_") else 0

        return sorted(self._chosen(operation), key=shared, reverse=True)

    def _select(
        self,
        operation: str,
        kernel_set: str,
        arch: ArchSpec,
        pattern: str,
        session: bytes = b"",
        pause: Callable[[], None] = _nothing,
    ) -> Iterator[KernelConfig]:
        chosen = self._chosen(operation)
        if kernel_set not in ("", REGISTERED) and not any(kernel_set in item.kernel_sets for item in chosen):
            raise NotFoundError(
                "there is no kernel set of that name",
                field="kernel_set",
                value=kernel_set,
                rule="kernel_set_name",
                fix=f"use {close_names(kernel_set, known := tuple(self.kernel_sets(operation))) or ', '.join(known)}",
            )
        for item in chosen:
            seen: set[KernelConfig] = set()
            for name in item.kernel_sets:
                if kernel_set and name != kernel_set:
                    continue
                for config in self._expanded(item, name, arch, pause):
                    if config not in seen and (not pattern or fnmatchcase(config.name, pattern)):
                        seen.add(config)
                        yield config
            for config in self._registered.of(item.name, session) if kernel_set in ("", REGISTERED) else ():
                matches = config not in seen and (not pattern or fnmatchcase(config.name, pattern))
                if matches and item.rules.allows(config, arch):
                    yield config

    def _expanded(
        self, operation: Operation[Any, Any], name: str, arch: ArchSpec, pause: Callable[[], None]
    ) -> Sequence[KernelConfig]:
        """Kernels of a set. The first time this takes up to seconds of computing, with pauses."""
        key = (operation.name, name, arch)
        found = self._sets.get(key)
        if found is None:
            made: list[KernelConfig] = []
            for config in operation.kernel_sets[name].iterate(arch, operation.rules):
                made.append(config)
                pause()
            found = tuple(made)
            self._sets.put(key, found)
        return found
