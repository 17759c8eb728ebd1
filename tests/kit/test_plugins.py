"""A plugin is loaded whole or not at all, and one that fails never stops another."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import toy
from plugin_objects import load_plugin

from tilewright_arch import ArchSpec
from tilewright_kit.kernel_sets.declare import DeferredDeclarations
from tilewright_kit.loading.hookspecs import ENTRY_POINT_GROUP, hookimpl
from tilewright_kit.loading.loader import LoadedPlugin, PluginFailure, PluginManager
from tilewright_kit.loading.moved_modules import MOVED
from tilewright_kit.selection.strategies import FirstFit


@pytest.fixture
def manager(arch: ArchSpec) -> PluginManager:
    return PluginManager(archs=[arch])


class Offering:
    """A plugin that offers what it is given."""

    def __init__(self, operations: Any = (), devices: Any = (), strategies: Any = ()) -> None:
        self.offers = operations, devices, strategies

    @hookimpl
    def tilewright_operations(self) -> Any:
        return self.offers[0]

    @hookimpl
    def tilewright_devices(self) -> Any:
        return self.offers[1]

    @hookimpl
    def tilewright_strategies(self) -> Any:
        return self.offers[2]


class Provider:
    def __init__(self, kind: str = "abacus") -> None:
        self.kind = kind

    def discover(self) -> tuple[()]:
        return ()

    def open(self, info: Any) -> Any:
        raise NotImplementedError

    def diagnose(self) -> dict[str, str]:
        return {}


def named(name: str, prefix: str = "") -> Any:
    """The toy operation under another name, and perhaps with kernels that are not named for it."""
    config = type("Named", (toy.ToyConfig,), {"operation": name, "prefix": prefix, "__annotations__": {}})
    kernels = toy.KernelSet("default", "", (toy.declare(config),), toy.choices)
    return type("Op", (toy.ToyOperation,), {"name": name, "config_type": config, "kernel_sets": {"default": kernels}})()


def strategy(name: str) -> Any:
    return type("Named", (FirstFit,), {"name": name})()


def everything(manager: PluginManager) -> tuple[list[str], list[str], list[str]]:
    return list(manager.operations), list(manager.devices), list(manager.strategies)


def test_a_plugin_is_recorded_with_what_it_offers(manager: PluginManager) -> None:
    plugin = Offering([named("add")], [Provider()], [strategy("random")])
    loaded = load_plugin(manager, plugin, "mine", "dist", "1.2")
    assert isinstance(loaded, LoadedPlugin)
    assert (loaded.name, loaded.distribution, loaded.version) == ("mine", "dist", "1.2")
    assert everything(manager) == (["add"], ["abacus"], ["random"])
    assert manager.failures == []


def test_a_module_with_hooks_is_a_plugin(manager: PluginManager) -> None:
    loaded = manager.load_module("toy")
    assert isinstance(loaded, LoadedPlugin), manager.failures
    assert list(manager.operations) == ["toy"]


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def tilewright_operations(self) -> Any:
        return [named("half")]

    @hookimpl
    def tilewright_devices(self) -> Any:
        raise self.error


class UnknownHook(Offering):
    @hookimpl
    def tilewright_operation(self) -> Any:
        return []


class UnknownArgument:
    @hookimpl
    def tilewright_startup(self, servers: Any) -> None: ...


class Unmarked:
    def tilewright_operations(self) -> Any:
        return [named("unmarked")]


BROKEN_SETS = {"default": toy.KernelSet("default", "", (toy.declare(toy.ToyConfig, vector=3),), toy.choices)}


def deferred(*makers: Callable[[], Any]) -> toy.KernelSet[Any]:
    """A set whose declarations are made by ``makers`` when they are asked for."""
    return toy.KernelSet("default", "", DeferredDeclarations(lambda: (make() for make in makers)), toy.choices)


OTHER = type("OtherConfig", (toy.ToyConfig,), {"operation": "other", "__annotations__": {}})
STRANGE_SETS = {"default": deferred(lambda: toy.declare(OTHER))}

BAD_PLUGINS: dict[str, tuple[Any, str]] = {
    "raises in a hook": (Raising(RuntimeError("no luck")), "RuntimeError: no luck"),
    "exits in a hook": (Raising(SystemExit(3)), "SystemExit: 3"),
    "has an unknown hook": (UnknownHook([named("half")]), "tilewright_operation"),
    "has an unknown argument": (UnknownArgument(), "servers"),
    "forgets the marker": (Unmarked(), "not marked with @hookimpl"),
    "has no hook": (object(), "implements no hook"),
    "returns no list": (Offering("operations"), "not a list or tuple"),
    "offers no operation": (Offering([3]), "it has no method parse"),
    "offers a class": (Offering([toy.ToyOperation]), "a class, not an object"),
    "offers one operation twice": (Offering([named("twice"), named("twice")]), "operation 'twice' is already offered"),
    "offers what another does": (Offering([named("new"), named("first")]), "operation 'first' is already offered"),
    "names kernels as another does": (
        Offering([named("new", prefix="first")]), "prefix of kernel names 'first' is already offered"),
    "offers a device twice": (Offering([named("new")], [Provider("first")]), "device kind 'first' is already offered"),
    "offers no device": (Offering([named("new")], [object()]), "not a device provider"),
    "offers a device without methods": (
        Offering([], [types.SimpleNamespace(kind="x", discover=print)]), "no method open"),
    "offers no strategy": (Offering([named("new")], [], [strategy("")]), "not a strategy"),
    "offers a strategy twice": (Offering([], [], [strategy("first")]), "strategy 'first' is already offered"),
    "offers an operation without kernels": (
        Offering([type("Op", (toy.ToyOperation,), {"kernel_sets": BROKEN_SETS})()]), "no valid kernel on any arch"),
    "declares another's kernels": (
        Offering([type("Op", (toy.ToyOperation,), {"kernel_sets": STRANGE_SETS})()]), "declares OtherConfig"),
    "offers another's configurations": (
        Offering([type("Op", (toy.ToyOperation,), {"name": "other"})()]), "named for operation 'toy'"),
    "offers no version": (Offering([type("Op", (toy.ToyOperation,), {"version": ""})()]), "no version"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_PLUGINS)
def test_a_bad_plugin_leaves_nothing_behind_and_the_rest_works(manager: PluginManager, what: str) -> None:
    plugin, reason = BAD_PLUGINS[what]
    load_plugin(manager, Offering([named("first")], [Provider("first")], [strategy("first")]), "first")
    failure = load_plugin(manager, plugin, "bad", "dist", "0.1")
    assert isinstance(failure, PluginFailure)
    assert reason in failure.reason
    assert (failure.name, failure.distribution, failure.version) == ("bad", "dist", "0.1")
    assert manager.failures == [failure]
    assert everything(manager) == (["first"], ["first"], ["first"])
    assert isinstance(load_plugin(manager, Offering([named("second")]), "second"), LoadedPlugin)
    assert manager.startup(object()) == ()
    assert [plugin.name for plugin in manager.loaded] == ["first", "second"]


def test_loading_a_plugin_makes_no_more_declarations_than_it_must(manager: PluginManager) -> None:
    made: list[int] = []

    def maker(vector: int) -> Callable[[], Any]:
        return lambda: made.append(vector) or toy.declare(toy.ToyConfig, vector=vector)

    kernels = deferred(*map(maker, (3, 4, 1, 2)))  # the first is valid on no arch
    operation = type("Op", (toy.ToyOperation,), {"kernel_sets": {"default": kernels}})()
    assert isinstance(load_plugin(manager, Offering([operation]), "mine"), LoadedPlugin)
    assert made == [3, 4]
    assert [declaration.fields["vector"] for declaration in kernels] == [(3,), (4,), (1,), (2,)]
    assert made == [3, 4, 1, 2]


def test_a_name_is_free_again_after_a_failure(manager: PluginManager) -> None:
    load_plugin(manager, Raising(RuntimeError()), "mine")
    assert isinstance(load_plugin(manager, Offering([named("half")]), "mine"), LoadedPlugin)


def test_a_plugin_is_loaded_once(manager: PluginManager) -> None:
    plugin = Offering([named("one")])
    load_plugin(manager, plugin, "one")
    assert isinstance(load_plugin(manager, plugin, "other"), PluginFailure)
    assert isinstance(load_plugin(manager, Offering([named("two")]), "one"), PluginFailure)


@pytest.mark.parametrize(
    "text", ["raise RuntimeError('at import')", "import sys; sys.exit(1)", "def broken(:", "import no_such_module"]
)
def test_a_module_that_fails_at_import_is_reported_with_its_traceback(
    manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "bad_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("bad_plugin", None)
    failure = manager.load_module("bad_plugin")
    assert isinstance(failure, PluginFailure)
    assert "Traceback" in failure.traceback
    assert isinstance(manager.load_module("toy"), LoadedPlugin)


# ---- entry points ----


def point(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, target, ENTRY_POINT_GROUP)


def test_entry_points_are_loaded_and_failures_do_not_stop_the_others(manager: PluginManager) -> None:
    manager.load_entry_points([point("zoo", "toy"), point("a", "no_such_module_at_all")])
    assert [plugin.name for plugin in manager.loaded] == ["zoo"]
    assert [failure.name for failure in manager.failures] == ["a"]


@pytest.mark.parametrize(
    ("enable", "disable", "loaded"),
    [(None, (), ["toy"]), (["toy"], (), ["toy"]), ([], (), []), (None, ["toy"], []), (["toy"], ["toy"], [])],
)
def test_entry_points_are_filtered_by_name(arch: ArchSpec, enable: Any, disable: Any, loaded: list[str]) -> None:
    manager = PluginManager(enable, disable, [arch])
    manager.load_entry_points([point("toy", "toy")])
    assert [plugin.name for plugin in manager.loaded] == loaded


def test_an_enabled_name_that_nothing_provides_is_a_failure(arch: ArchSpec) -> None:
    manager = PluginManager(["toy", "tyo"], archs=[arch])
    manager.load_entry_points([point("toy", "toy")])
    assert [failure.name for failure in manager.failures] == ["tyo"]


# ---- life cycle ----


class Lifecycle:
    def __init__(self, name: str, calls: list[str], error: BaseException | None = None) -> None:
        self.name, self.calls, self.error = name, calls, error

    @hookimpl
    def tilewright_startup(self, server: Any) -> None:
        self.calls.append(f"{self.name} up with {server}")
        if self.error:
            raise self.error

    @hookimpl
    def tilewright_shutdown(self) -> None:
        self.calls.append(f"{self.name} down")
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("late"), SystemExit(1)])
def test_a_plugin_that_fails_at_startup_is_named_and_stops_no_other(
    manager: PluginManager, error: BaseException
) -> None:
    calls: list[str] = []
    for name, raised in (("a", None), ("b", error), ("c", None)):
        load_plugin(manager, Lifecycle(name, calls, raised), name)
    assert [failure.name for failure in manager.startup("s")] == ["b"]
    assert [failure.name for failure in manager.shutdown("s")] == ["b"]
    assert calls == ["a up with s", "b up with s", "c up with s", "c down", "b down", "a down"]
    assert all("Traceback" in failure.traceback for failure in manager.failures)


# ---- plugins of an older kit ----


@pytest.mark.parametrize(
    ("statement", "old", "new"),
    [
        ("import tilewright_kit.plan", "tilewright_kit.plan", "tilewright_kit.contract.plan"),
        ("from tilewright_kit.words import Unary", "tilewright_kit.words", "tilewright_kit.types.vocabulary"),
        ("from tilewright_kit import rules", "tilewright_kit.rules", "tilewright_kit.config.rules"),
        # The old module's name is a folder's today.
        (
            "from tilewright_kit.config import KernelConfig",
            "tilewright_kit.config",
            "tilewright_kit.config.kernel_config",
        ),
    ],
)
def test_a_plugin_that_imports_an_old_module_is_told_its_new_name(
    manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, old: str, new: str
) -> None:
    (tmp_path / "old_plugin.py").write_text(f"{statement}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "old_plugin", raising=False)
    failure = manager.load_module("old_plugin")
    assert isinstance(failure, PluginFailure)
    assert f"{old} is now {new}" in failure.reason


def test_a_plugin_that_imports_what_never_was_keeps_the_reason_of_python(
    manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_plugin.py").write_text("from tilewright_kit.contract.plan import Planet\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    failure = manager.load_module("odd_plugin")
    assert isinstance(failure, PluginFailure)
    assert "is now" not in failure.reason and "Planet" in failure.reason


def test_every_new_name_of_a_module_is_one_of_the_kit() -> None:
    for new in MOVED.values():
        for module in new.split(" and "):
            assert importlib.util.find_spec(module) is not None, module
