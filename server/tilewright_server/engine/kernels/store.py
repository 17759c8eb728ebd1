"""From a configuration to a function that can be launched: generated once, built once, loaded once for each device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import alias_of
from tilewright_kit.contract.device import Device, Module
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, DeviceError, InternalError, NotFoundError
from tilewright_server.build.cache.artifacts import Artifact, ArtifactCache
from tilewright_server.build.pool import Build, BuildPool
from tilewright_server.clients.client import Client
from tilewright_server.engine.call import Call
from tilewright_server.engine.kernels.loaded import Modules, ModuleUse
from tilewright_server.engine.lru import Lru

__all__ = ["KernelStore", "KernelUse", "Unit"]

_UNITS = 4096
_SOURCE_BYTES = 16 << 20
_LOAD_ATTEMPTS = 3
_BUILDS = 2
"""Binaries of a kernel that are tried before it is refused."""
_UNLOADABLE = frozenset({"module_load", "module_entry"})
"""Rules of devices for binaries that are of no use to them."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unit:
    """A source unit with its artifact key."""

    source: SourceUnit
    key: str

    def symbol(self, role: str) -> str:
        """Name of an entry point in the binary."""
        symbol = self.source.entries.get(role)
        if symbol is None:
            raise InternalError(
                f"{self.source.name} has no entry for the role {role}",
                field="role",
                value=role,
                rule="plan_role",
                fix="report it as a fault of the operation's plugin",
            )
        return symbol


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A loaded kernel, which stays loaded, and locked in the cache, while this object exists."""

    unit: Unit
    module: ModuleUse

    def function(self, role: str) -> int:
        """Handle of an entry point."""
        return self.module.function(self.unit.symbol(role))


class KernelStore:
    """Kernels of all operations. Thread-safe."""

    def __init__(
        self,
        operations: Mapping[str, Operation[Any, Any]],
        cache: ArtifactCache,
        pool: BuildPool,
        max_loaded: int = 1024,
    ) -> None:
        """More than ``max_loaded`` kernels stay loaded only while they are in use."""
        self._operations = operations
        self._cache = cache
        self._pool = pool
        self._sources: Lru[tuple[str, KernelConfig], SourceUnit] = Lru(_UNITS, _SOURCE_BYTES)
        self._named: Lru[tuple[str, str], KernelConfig] = Lru(2 * _UNITS)
        self._modules = Modules(max_loaded)
        self._pinned: list[Artifact] = []
        self._lock = threading.Lock()

    def remember(self, configs: Iterable[KernelConfig]) -> None:
        """Know these by name: what a plan or an explanation names can be asked for, though no set declares it."""
        for config in configs:
            self._named.put((config.operation, config.name), config)
            self._named.put((config.operation, alias_of(config.name)), config)

    def forget(self, config: KernelConfig) -> None:
        """Know this one by name no more, unless a set declares it."""
        for name in (config.name, alias_of(config.name)):
            self._named.discard((config.operation, name))

    def named(self, operation: str, name: str) -> KernelConfig | None:
        """A configuration that was remembered, by its name or alias."""
        return self._named.get((operation, name))

    def source(self, config: KernelConfig, arch: ArchSpec) -> SourceUnit:
        """The translation unit. Raises ``ConfigInvalidError`` or ``UnsupportedError``."""
        known = self._sources.get((arch.id, config))
        if known is None:
            operation = self._operations.get(config.operation)
            if operation is None:
                raise NotFoundError(
                    "a stage of the plan belongs to an operation that is not loaded",
                    field="operation",
                    value=config.operation,
                    rule="operation_name",
                    fix="load the plugin that has it",
                )
            known = operation.generate(config, arch)
            self._sources.put((arch.id, config), known, 2 * len(known.text))
        return known

    def unit(self, config: KernelConfig, arch: ArchSpec) -> Unit:
        """Source and key. The key is computed anew each time: a header or the compiler may have changed."""
        source = self.source(config, arch)
        return Unit(source, self._pool.key(source, arch))

    def is_ready(self, device: str, unit: Unit) -> bool:
        """True if the kernel can run without a build."""
        return (device, unit.key) in self._modules or self._cache.contains(unit.key)

    def is_built(self, unit: Unit) -> bool:
        return self._cache.contains(unit.key)

    def submit(
        self, unit: Unit, arch: ArchSpec, client: Client, *, retry_failed: bool = False, held: bool = False
    ) -> Build:
        """See ``BuildPool.submit``."""
        return self._pool.submit(unit.source, arch, key=unit.key, retry_failed=retry_failed, client=client, held=held)

    def release(self, build: Build) -> None:
        """See ``BuildPool.release``."""
        self._pool.release(build)

    def obtain(self, units: Sequence[Unit], device: str, arch: ArchSpec, call: Call) -> None:
        """Have all of ``units`` built, in parallel; the time that the caller waited goes to ``call.build_ns``."""
        self._build([unit for unit in units if not self.is_ready(device, unit)], arch, call)

    def _build(self, units: Sequence[Unit], arch: ArchSpec, call: Call) -> None:
        """Build in parallel, and wait; ``call.build_ns`` grows by their time, at most by the time waited."""
        begin = time.perf_counter_ns()
        builds: list[Build] = []
        try:
            for unit in units:
                builds.append(self.submit(unit, arch, call.client, held=True))  # noqa: PERF401 - one may raise
            for build in builds:
                build.wait(call)
        finally:
            for build in builds:
                self.release(build)
        call.build_ns += min(sum(build.build_ns for build in builds), time.perf_counter_ns() - begin)

    def use(self, device: Device, unit: Unit, arch: ArchSpec, call: Call) -> KernelUse:
        """Load a kernel if need be.

        A binary that cannot be loaded is set aside and built once more; a second one that cannot is set aside too, and
        refused for a while. Raises ``BuildFailedError``, ``DeviceError``, ``ResourceExhaustedError``, or what a rebuild
        raises.
        """

        def load() -> tuple[Module, Artifact]:
            for _ in range(_BUILDS):
                artifact = self.artifact(unit, arch, call)
                try:
                    return _loaded(device, artifact, unit), artifact
                except DeviceError as error:
                    if error.rule not in _UNLOADABLE:
                        artifact.release()
                        raise
                    log.warning("the binary of %s is set aside: %s", unit.source.name, error)
                    self._cache.condemn(artifact)
                    refused = _useless(unit, error)
                except BaseException:
                    artifact.release()
                    raise
            self._pool.refuse(unit.key, refused)
            raise refused

        return KernelUse(unit, self._modules.use((device.info.id, unit.key), load))

    @property
    def loaded(self) -> int:
        """How many kernels are loaded."""
        return len(self._modules)

    def trim(self) -> bool:
        """Unload what is too many; True if what is in use is too many by itself."""
        return self._modules.trim()

    def drop(self, device: str) -> None:
        """A device was lost with all that was loaded on it."""
        self._modules.drop(device)

    def pin(self, unit: SourceUnit, arch: ArchSpec) -> Path:
        """Build a unit that is not an operation's (a device's runtime) and keep it until ``close``."""
        return self.artifact(Unit(unit, self._pool.key(unit, arch)), arch, Call(), pin=True).binary

    def artifact(self, unit: Unit, arch: ArchSpec, call: Call, *, pin: bool = False) -> Artifact:
        """The artifact, locked until it is released. It may be damaged, or evicted between build and lock: then it is
        built again.
        """
        for _ in range(_LOAD_ATTEMPTS):
            artifact = self._cache.get(unit.key)
            if artifact is not None:
                if pin:
                    with self._lock:
                        self._pinned.append(artifact)
                return artifact
            self._build([unit], arch, call)
        raise InternalError(
            "a kernel vanished from the cache as often as it was built",
            rule="cache_vanished",
            fix="try again; make sure that nothing else removes files from the cache",
        )

    def close(self) -> None:
        """Let go of everything. Devices unload their modules when they are closed, which must be done first."""
        self._modules.close()
        with self._lock:
            pinned, self._pinned = self._pinned, []
        for artifact in pinned:
            artifact.release()


def _loaded(device: Device, artifact: Artifact, unit: Unit) -> Module:
    """The loaded module, which has all entry points. Raises ``DeviceError``."""
    module = device.load(artifact.binary)
    try:
        for symbol in unit.source.entries.values():
            module.function(symbol)
    except BaseException:
        module.unload()
        raise
    return module


def _useless(unit: Unit, error: DeviceError) -> BuildFailedError:
    return BuildFailedError(
        f"{unit.source.name} was built twice, and could be loaded neither time: {error.reason}",
        value=error.value,
        rule="binary_unloadable",
        fix="compare compiler, driver and device with `tilewright doctor`; choose another kernel meanwhile",
    )
