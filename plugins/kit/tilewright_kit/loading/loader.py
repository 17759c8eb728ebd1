"""Loading plugins: each in a transaction, so that one that fails leaves nothing behind and the rest works."""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceProvider
from tilewright_kit.contract.operation import Operation
from tilewright_kit.loading import hookspecs
from tilewright_kit.loading.announced import ANNOUNCEMENT, Announced, Operations, announced_by
from tilewright_kit.loading.check_operation import check_operation
from tilewright_kit.loading.hookspecs import ENTRY_POINT_GROUP, HOOK_NAMESPACE
from tilewright_kit.loading.moved_modules import moved
from tilewright_kit.selection.strategies import Strategy

__all__ = ["LoadedPlugin", "PluginFailure", "PluginManager"]

log = logging.getLogger(__name__)

_OFFERS = ("tilewright_operations", "tilewright_devices", "tilewright_strategies", "tilewright_measurements")
_SPECIFIED = frozenset(name for name in vars(hookspecs) if name.startswith("tilewright_"))


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin that works, and what it offers."""

    name: str
    version: str
    distribution: str
    operations: tuple[Operation[Any, Any], ...] = ()
    devices: tuple[DeviceProvider, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    measurements: tuple[Path, ...] = ()
    """Files of measurements, whether a hook named them or they lie beside the module."""
    announced: tuple[str, ...] = ()
    """Names of operations that its package announces, as long as the rest of it is not imported."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its operations."""
        return self.announced or tuple(item.name for item in self.operations)


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that does not work, or a hook of one that failed. ``traceback`` is for the log, not for clients."""

    name: str
    distribution: str
    version: str
    reason: str
    traceback: str = ""


class _Refused(Exception):
    """Something about a plugin that we found ourselves; its traceback would tell nothing."""


class PluginManager:
    """The operations, devices and strategies of plugins. Loading is for start-up, from one thread; reading is for all,
    and imports what was only announced.

    ``enable`` (all, if None) and ``disable`` name entry points. ``archs`` are those that kernel sets are tried on; none
    means all that have a spec.
    """

    def __init__(
        self,
        enable: Collection[str] | None = None,
        disable: Collection[str] = (),
        archs: Sequence[ArchSpec] | None = None,
    ) -> None:
        self._enable = None if enable is None else frozenset(enable)
        self._disable = frozenset(disable)
        self._archs = archs
        self._hooks = _new_manager()
        self._objects: dict[str, object] = {}
        self._announced: dict[str, Announced] = {}
        self._made: dict[str, Operation[Any, Any]] = {}
        self._changing = threading.Lock()
        self._server: Any = None
        self.loaded: list[LoadedPlugin] = []
        self.failures: list[PluginFailure] = []

    # Offers

    @property
    def operations(self) -> Mapping[str, Operation[Any, Any]]:
        """All operations by name, in the order in which they were loaded: those of now and of later."""
        return Operations(self._names, lambda: self._made, self.finish)

    def _names(self) -> tuple[str, ...]:
        return tuple(name for plugin in self.loaded for name in plugin.names)

    @property
    def devices(self) -> dict[str, DeviceProvider]:
        """All device providers by kind."""
        return {item.kind: item for plugin in self.loaded for item in plugin.devices}

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategies that plugins add, by name."""
        return {item.name: item for plugin in self.loaded for item in plugin.strategies}

    @property
    def measurements(self) -> tuple[Path, ...]:
        """Files of measurements that plugins bring, each once, in the order in which they were loaded."""
        return tuple(dict.fromkeys(path for plugin in self.loaded for path in plugin.measurements))

    @property
    def models(self) -> tuple[Path, ...]:
        """Files of learned models: those in the folder ``measured`` beside a plugin's module."""
        folders = [*map(_folder, self._objects.values()), *(item.folder for item in self._announced.values())]
        return tuple(path for folder in folders for path in _measured(folder, "*.npz"))

    # Loading

    def load_entry_points(self, found: Iterable[EntryPoint] | None = None, *, announced: bool = False) -> None:
        """Load all enabled entry points of the group: our own distribution first, then by distribution and name.

        Never raises for a plugin; see ``failures``. A name in ``enable`` that nothing provides is a failure too. Where
        it is enough that operations are ``announced``, plugins whose package does so are imported when one is looked up
        or by ``finish``.
        """
        given = entry_points(group=ENTRY_POINT_GROUP) if found is None else found
        points = [(_origin(point), point) for point in given]
        points.sort(key=lambda item: (item[0][0] != "tilewright", item[0][0], item[1].name))
        for origin, point in points:
            if (self._enable is None or point.name in self._enable) and point.name not in self._disable:
                waiting = announced_by(point, origin) if announced else None
                if waiting is None or not self._announce(point.name, waiting):
                    self._load(point.name, *origin, point.load)
        for missing in sorted((self._enable or frozenset()) - {point.name for _, point in points}):
            self._fail(missing, "", "", "no installed distribution provides a plugin of this name")

    def load_module(self, module: str, name: str = "") -> LoadedPlugin | PluginFailure:
        """Load a module by its import path."""
        return self._load(name or module, "", "", lambda: importlib.import_module(module))

    def finish(self, operation: str = "") -> None:
        """Import the plugin that announced an operation, or all that announced any; again, nothing is done."""
        for name in [item.name for item in self.loaded if item.announced and operation in ("", *item.announced)]:
            waiting = self._announced.get(name)
            if waiting is None:
                continue
            with waiting.lock:
                if name in self._announced:
                    self._load(name, *waiting.origin, waiting.get)

    def _announce(self, name: str, waiting: Announced) -> bool:
        """Note an announcement; false if it clashes with what is offered already, which loading then tells."""
        taken = self._first_words("")
        words = waiting.prefixes
        if name in self._objects or taken.keys() & words.keys() or {*taken.values()} & {*words.values()}:
            return False
        self._announced[name] = waiting
        files = _measured(waiting.folder, "*.jsonl")
        distribution, version = waiting.origin
        self.loaded.append(LoadedPlugin(name, version, distribution, measurements=files, announced=tuple(words)))
        return True

    def _first_words(self, but: str) -> dict[str, str]:
        """First words of kernel names by operation, of all plugins but one."""
        found: dict[str, str] = {}
        for plugin in self.loaded:
            if plugin.name != but:
                found.update({item.name: _first_words(item) for item in plugin.operations})
                waiting = self._announced.get(plugin.name)
                found.update(waiting.prefixes if waiting is not None else {})
        return found

    def _load(
        self, name: str, distribution: str, version: str, get: Callable[[], object]
    ) -> LoadedPlugin | PluginFailure:
        try:
            if name in self._objects:
                raise _Refused(f"a plugin named {name!r} is already loaded")
            plugin = get()
            offered = self._try(plugin, name)
            loaded = LoadedPlugin(name, version or _version_of(plugin), distribution, *offered)
            # The first change to what others see, and nothing after it can fail: the same steps passed in the trial.
            self._hooks.register(plugin, name)
        except _Refused as error:
            return self._fail(name, distribution, version, str(error))
        except (Exception, SystemExit) as error:  # a module may call sys.exit; the server must not follow
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ImportError) and (place := moved(error)):
                reason = f"it was written for an older kit: {place}; docs/adding-an-operation.md lists the modules"
            return self._fail(name, distribution, version, reason, traceback.format_exc())
        with self._changing:
            self._objects[name] = plugin
            if self._announced.pop(name, None) is None:
                self.loaded.append(loaded)
            else:
                self.loaded[:] = [loaded if item.name == name else item for item in self.loaded]
            self._made = {item.name: item for each in self.loaded for item in each.operations}
            late = self._server is not None
        if late:
            self._call_each("tilewright_startup", self._server, [loaded])
        return loaded

    def _fail(self, name: str, distribution: str, version: str, reason: str, trace: str = "") -> PluginFailure:
        failure = PluginFailure(name, distribution, version, reason, trace)
        with self._changing:
            if self._announced.pop(name, None) is not None:
                self.loaded[:] = [item for item in self.loaded if item.name != name]
            self.failures.append(failure)
        log.error("plugin %s is not used: %s\n%s", name, reason, trace)
        return failure

    def _try(
        self, plugin: object, name: str
    ) -> tuple[tuple[Operation[Any, Any], ...], tuple[DeviceProvider, ...], tuple[Strategy, ...], tuple[Path, ...]]:
        """Register the plugin with a manager of its own and check everything that it offers."""
        if any(plugin is other for other in self._objects.values()):
            raise _Refused("this plugin is already loaded under another name")
        trial = _new_manager()
        trial.register(plugin, name)
        trial.check_pending()  # rejects hooks that are not specified
        implemented = {caller.name for caller in trial.get_hookcallers(plugin) or ()}
        forgotten = sorted(_SPECIFIED & {item for item in dir(plugin) if item.startswith("tilewright_")} - implemented)
        if forgotten:
            raise _Refused(f"{forgotten[0]} is not marked with @hookimpl")
        if not implemented:
            raise _Refused("it implements no hook")
        waiting = self._announced.get(name)
        if waiting is not None and (early := sorted(implemented & set(_OFFERS[1:]))):
            raise _Refused(f"it implements {early[0]}, so its package must not have {ANNOUNCEMENT}")
        operations, devices, strategies, measurements = (_collect(trial, hook) for hook in _OFFERS)
        for operation in operations:
            reasons = check_operation(operation, self._archs)
            if reasons:
                raise _Refused(f"operation {getattr(operation, 'name', operation)!r}: {'; '.join(reasons)}")
        for device in devices:
            _require(device, "device provider", "kind", ("discover", "open", "diagnose"))
        for strategy in strategies:
            _require(strategy, "strategy", "name", ("rank",))
        for path in measurements:
            if not isinstance(path, Path):
                raise _Refused(f"tilewright_measurements returned {path!r}, which is no path")
        taken = self._first_words(name)
        words = {item.name: _first_words(item) for item in operations}
        if waiting is not None and words != waiting.prefixes:
            raise _Refused(f"its package announces {dict(waiting.prefixes)} in {ANNOUNCEMENT}, and it offers {words}")
        _refuse_duplicates("operation", [item.name for item in operations], taken)
        _refuse_duplicates("prefix of kernel names", [*map(_first_words, operations)], [*taken.values()])
        _refuse_duplicates("device kind", [item.kind for item in devices], self.devices)
        _refuse_duplicates("strategy", [item.name for item in strategies], self.strategies)
        return operations, devices, strategies, (*_measured(_folder(plugin), "*.jsonl"), *measurements)

    # Life cycle

    def startup(self, server: Any) -> tuple[PluginFailure, ...]:
        """Tell every plugin that the server is about to take requests, or does so when it is imported later. Failures
        are named, and stop no other plugin.
        """
        with self._changing:
            self._server, known = server, list(self.loaded)
        return self._call_each("tilewright_startup", server, known)

    def shutdown(self, server: Any) -> tuple[PluginFailure, ...]:
        """Tell every plugin, last loaded first, that the server has answered its last request."""
        return self._call_each("tilewright_shutdown", server, list(reversed(self.loaded)))

    def _call_each(self, hook: str, server: Any, plugins: Sequence[LoadedPlugin]) -> tuple[PluginFailure, ...]:
        failures = []
        for plugin in plugins:
            others = [item for name, item in self._objects.items() if name != plugin.name]
            try:
                self._hooks.subset_hook_caller(hook, others)(server=server)
            except (Exception, SystemExit) as error:
                reason = f"{hook}: {type(error).__name__}: {error}"
                failures.append(
                    PluginFailure(plugin.name, plugin.distribution, plugin.version, reason, traceback.format_exc())
                )
                log.exception("plugin %s failed in %s", plugin.name, hook)
        self.failures.extend(failures)
        return tuple(failures)


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(HOOK_NAMESPACE)
    manager.add_hookspecs(hookspecs)
    return manager


def _collect(trial: pluggy.PluginManager, hook: str) -> tuple[Any, ...]:
    results: list[Any] = []
    for result in getattr(trial.hook, hook)():
        if not isinstance(result, (list, tuple)):
            raise _Refused(f"{hook} returned {type(result).__name__}, not a list or tuple")
        results.extend(result)
    return tuple(results)


def _require(item: object, what: str, label: str, methods: Sequence[str]) -> None:
    name = getattr(item, label, None)
    if inspect.isclass(item) or not isinstance(name, str) or not name:
        raise _Refused(f"{item!r} is not a {what}: it has no {label}, or is a class and not an object")
    for method in methods:
        if not callable(getattr(item, method, None)):
            raise _Refused(f"{what} {name!r} has no method {method}")


def _refuse_duplicates(what: str, names: Sequence[str], taken: Collection[str]) -> None:
    for index, name in enumerate(names):
        if name in taken or name in names[:index]:
            raise _Refused(f"{what} {name!r} is already offered")


def _first_words(operation: Operation[Any, Any]) -> str:
    """The beginning of every kernel name of the operation."""
    config: type[KernelConfig] = operation.config_type
    return config.prefix or config.operation


def _origin(point: EntryPoint) -> tuple[str, str]:
    return ("", "") if point.dist is None else _name_and_version(point.dist)


@lru_cache(maxsize=16)
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Read once for all plugins of a distribution: the file has its whole description in it."""
    found = distribution.metadata
    return found["Name"], found["Version"]


def _folder(plugin: object) -> Path | None:
    """The folder of a module."""
    file = getattr(plugin, "__file__", None)
    return Path(file).parent if isinstance(file, str) else None


def _measured(folder: Path | None, pattern: str) -> tuple[Path, ...]:
    """The files of a kind in the folder ``measured`` beside a plugin's module."""
    found = folder / "measured" if folder is not None else None
    return tuple(sorted(found.glob(pattern))) if found is not None and found.is_dir() else ()


def _version_of(plugin: object) -> str:
    version = getattr(plugin, "__version__", "")
    return version if isinstance(version, str) else ""
