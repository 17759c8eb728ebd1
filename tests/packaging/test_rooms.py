"""Imports run downwards on every level: the folders and modules of a folder import each other in one direction.

Every import counts, also inside functions and for type checkers only.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (
    "arch",
    "client",
    "emulator",
    "native",
    "plugins/fmha",
    "plugins/moe",
    "plugins/gemm",
    "plugins/grouped_conv",
    "plugins/kit",
    "server",
    "tools",
)
MOST_ENTRIES = 12
"""Entries of one folder, without ``__init__.py``; about ten is the aim."""
MOST_ROOMS = 16
"""Entries of a plugin's own folder: the steps of one operation, whose order ``docs/architecture.md`` gives."""


def sources(root: str) -> dict[str, str]:
    """Text of every module under a source root, by its path below that root."""
    folder = ROOT / root
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in sorted(folder.glob("tilewright*/**/*.py"))
    }


def imports(text: str) -> Iterator[str]:
    """Dotted names that a module imports: of modules, and of what it takes from them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield target.value


def module_of(name: str, modules: Mapping[str, str]) -> str | None:
    """Path of the module that a dotted name means, or that defines it; none for foreign names."""
    path = name.replace(".", "/")
    for candidate in (path, path.rpartition("/")[0]):
        for file in (f"{candidate}.py", f"{candidate}/__init__.py"):
            if file in modules:
                return file
    return None


def arrows(modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Pairs of modules of which the first imports the second."""
    for path, text in modules.items():
        for name in imports(text):
            target = module_of(name, modules)
            if target and target != path:
                yield path, target


def entry(path: str, folder: str) -> str | None:
    """Child of ``folder`` that ``path`` is or lies in; none for what is elsewhere or the folder's own ``__init__``."""
    if not path.startswith(f"{folder}/"):
        return None
    child = path[len(folder) + 1 :].split("/")[0]
    return None if child == "__init__.py" else child


def circles(modules: Mapping[str, str]) -> list[str]:
    """One line for each pair of entries of a folder on a circle of imports, with the modules that tie them."""
    folders = sorted({str(parent) for path in modules for parent in Path(path).parents} - {"."})
    pairs = list(arrows(modules))
    found = []
    for folder in folders:
        ties: dict[tuple[str, str], list[str]] = defaultdict(list)
        for source, target in pairs:
            ends = entry(source, folder), entry(target, folder)
            if ends[0] and ends[1] and ends[0] != ends[1]:
                ties[ends[0], ends[1]].append(f"{source} -> {target}")
        reach = reachable(list(ties))
        found += [
            f"{folder}: {first} and {second}: {', '.join(sorted(set(lines)))}"
            for (first, second), lines in sorted(ties.items())
            if first in reach[second]
        ]
    return found


def reachable(pairs: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    """Entries that each entry reaches over one import or more."""
    onward: dict[str, set[str]] = defaultdict(set)
    for first, second in pairs:
        onward[first].add(second)
    reach: dict[str, set[str]] = {}
    for start in {name for pair in pairs for name in pair}:
        seen: set[str] = set()
        ahead = list(onward[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += onward[name]
        reach[start] = seen
    return reach


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_no_folder_has_a_circle_of_imports(root: str) -> None:
    assert circles(sources(root)) == []


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_no_folder_has_more_entries_than_a_reader_takes_in_at_once(root: str) -> None:
    entries: dict[str, set[str]] = defaultdict(set)
    for path in sources(root):
        for parent in Path(path).parents:
            if str(parent) != "." and (child := entry(path, str(parent))):
                entries[str(parent)].add(child)
    plugin = f"tilewright_{root.rpartition('/')[2]}"
    most = defaultdict(lambda: MOST_ENTRIES, {plugin: MOST_ROOMS} if root.startswith("plugins/") else {})
    assert {folder: sorted(names) for folder, names in entries.items() if len(names) > most[folder]} == {}


def test_a_planted_circle_is_found() -> None:
    modules = {
        "pkg/a/one.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.b.two import Two\n",
        "pkg/b/two.py": "def late() -> None:\n    from pkg.a import one\n",
        "pkg/b/three.py": "import pkg.b.two\n",
    }
    assert circles(modules) == [
        "pkg: a and b: pkg/a/one.py -> pkg/b/two.py",
        "pkg: b and a: pkg/b/two.py -> pkg/a/one.py",
    ]
