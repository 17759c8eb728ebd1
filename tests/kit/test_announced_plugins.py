"""A plugin whose package names its operations is imported when one is looked up, and checked like any other then."""

from __future__ import annotations

import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import toy
from plugin_objects import load_plugin

from tilewright_arch import ArchSpec
from tilewright_kit.loading.announced import ANNOUNCEMENT
from tilewright_kit.loading.hookspecs import ENTRY_POINT_GROUP
from tilewright_kit.loading.loader import PluginFailure, PluginManager

PLUGIN = """
import toy
from tilewright_kit.loading.hookspecs import hookimpl

@hookimpl
def tilewright_operations():
    return [toy.ToyOperation()]
"""


class Packages:
    """Packages with an announcement and a plugin, and a manager that found their entry points."""

    def __init__(self, folder: Path, arch: ArchSpec) -> None:
        self._folder = folder
        self._points: list[EntryPoint] = []
        self.manager = PluginManager(archs=[arch])

    def add(self, name: str, announced: Any, plugin: str = PLUGIN) -> Path:
        package = self._folder / name
        package.mkdir()
        (package / "__init__.py").write_text(f"{ANNOUNCEMENT} = {announced!r}\n")
        (package / "plugin.py").write_text(plugin)
        self._points.append(EntryPoint(name, f"{name}.plugin", ENTRY_POINT_GROUP))
        return package

    def find(self) -> PluginManager:
        self.manager.load_entry_points(self._points, announced=True)
        return self.manager


@pytest.fixture
def packages(arch: ArchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [item for item in sys.modules if item.partition(".")[0] in ("lazy", "other")]:
        monkeypatch.delitem(sys.modules, name)
    return Packages(tmp_path, arch)


def reasons(manager: PluginManager) -> list[str]:
    return [failure.reason for failure in manager.failures]


def test_an_announced_plugin_is_imported_when_its_operation_is_looked_up(packages: Packages) -> None:
    packages.add("lazy", {"toy": "toy"})
    operations = packages.find().operations
    assert list(operations) == ["toy"] and "toy" in operations and len(operations) == 1
    assert operations.get("other") is None
    assert [item.names for item in packages.manager.loaded] == [("toy",)]
    assert "lazy.plugin" not in sys.modules
    found = operations["toy"]
    assert isinstance(found, toy.ToyOperation) and "lazy.plugin" in sys.modules
    assert operations["toy"] is found and [item.names for item in packages.manager.loaded] == [("toy",)]
    assert reasons(packages.manager) == []


def test_all_operations_are_imported_by_who_asks_for_all(packages: Packages) -> None:
    packages.add("lazy", {"toy": "toy"})
    assert [type(item) for item in packages.find().operations.values()] == [toy.ToyOperation]


@pytest.mark.parametrize(
    ("announced", "plugin", "reason"),
    [
        ({"toy": "toy"}, "raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ({"toy": "toy", "toys": "toys"}, PLUGIN, "and it offers {'toy': 'toy'}"),
        ({"toy": "tin"}, PLUGIN, "announces {'toy': 'tin'}"),
        (
            {"toy": "toy"},
            PLUGIN + "\n@hookimpl\ndef tilewright_devices():\n    return []\n",
            "it implements tilewright_devices",
        ),
    ],
)
def test_an_announced_plugin_that_fails_leaves_and_the_rest_works(
    packages: Packages, announced: dict[str, str], plugin: str, reason: str
) -> None:
    packages.add("lazy", announced, plugin)
    manager = packages.find()
    operations = manager.operations
    with pytest.raises(KeyError):
        operations["toy"]
    assert list(operations) == [] and manager.loaded == []
    assert len(manager.failures) == 1 and reason in manager.failures[0].reason
    assert load_plugin(manager, sys.modules["toy"], "toy") in manager.loaded
    assert list(operations) == ["toy"]


@pytest.mark.parametrize("announced", [["toy"], None, {}])
def test_what_is_no_announcement_is_imported_at_once(packages: Packages, announced: Any) -> None:
    packages.add("lazy", announced)
    assert packages.find().loaded[0].operations and "lazy.plugin" in sys.modules


def test_an_announcement_keeps_its_names(packages: Packages) -> None:
    packages.add("lazy", {"toy": "toy"})
    packages.add("other", {"toy": "tin"}, PLUGIN)
    manager = packages.find()
    assert reasons(manager) == ["operation 'toy' is already offered"]
    failure = load_plugin(manager, sys.modules["toy"], "late")
    assert isinstance(failure, PluginFailure) and "operation 'toy' is already offered" in failure.reason
    assert [item.name for item in manager.loaded] == ["lazy"]


def test_a_plugin_that_is_imported_later_is_told_of_the_start(packages: Packages) -> None:
    hook = "\ncalls = []\n@hookimpl\ndef tilewright_startup(server):\n    calls.append(server)\n"
    packages.add("lazy", {"toy": "toy"}, PLUGIN + hook)
    manager = packages.find()
    assert manager.startup("server") == () and "lazy.plugin" not in sys.modules
    manager.finish()
    manager.finish("toy")
    assert sys.modules["lazy.plugin"].calls == ["server"]


def test_measurements_are_found_beside_a_plugin_that_is_not_imported(packages: Packages) -> None:
    folder = packages.add("lazy", {"toy": "toy"}) / "measured"
    folder.mkdir()
    for name in ("toy.jsonl", "toy.npz"):
        (folder / name).write_text("")
    manager = packages.find()
    for _ in range(2):
        assert manager.measurements == (folder / "toy.jsonl",) and manager.models == (folder / "toy.npz",)
        manager.finish()


def test_threads_that_look_up_one_operation_get_one(packages: Packages) -> None:
    packages.add("lazy", {"toy": "toy"}, "import time\ntime.sleep(0.05)\n" + PLUGIN)
    operations = packages.find().operations
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(operations["toy"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(item) for item in found}) == 1
    assert len(packages.manager.loaded) == 1 and reasons(packages.manager) == []


def test_our_plugins_offer_what_their_packages_announce() -> None:
    manager = PluginManager(disable=["cpu", "cuda", "hip"])
    manager.load_entry_points(announced=True)
    ours = [item for item in manager.loaded if item.distribution == "tilewright"]
    assert {item.name for item in ours} == {"fmha", "gemm", "grouped_conv", "moe"} and all(
        item.announced for item in ours
    )
    manager.finish()
    assert reasons(manager) == [] and not any(item.announced for item in manager.loaded)
