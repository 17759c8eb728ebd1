"""Scripts that no test runs name modules of the house, and names in them, that there are."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    [*(ROOT / "bench").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "scripts").rglob("*.py")]
)


@cache
def names_of(module: str) -> frozenset[str]:
    """Names that a module binds outside of functions, its submodules among them; none if there is no such module."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return frozenset()
    if found is None or found.origin is None:
        return frozenset()
    names = {"__file__", "__name__"}
    if found.submodule_search_locations:
        for folder in map(Path, found.submodule_search_locations):
            names |= {path.stem for path in folder.iterdir()}
    waiting: list[ast.AST] = [ast.parse(Path(found.origin).read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)  # of __all__ and of tables of what is imported when it is first asked for
        waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names)


def missing(text: str) -> Iterator[str]:
    """Modules and names that ``text`` imports from the house and that are not there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tilewright"):
            offered = names_of(node.module)
            yield from (f"{node.module}.{item.name}" for item in node.names if item.name not in offered)
        elif isinstance(node, ast.Import):
            wanted = (item.name for item in node.names if item.name.startswith("tilewright"))
            yield from (name for name in wanted if not names_of(name))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_of_scripts_are_there(path: Path) -> None:
    assert list(missing(path.read_text("utf-8"))) == []


def test_missing_modules_and_names_are_found() -> None:
    text = "import tilewright\nfrom tilewright import Client, nothing\nfrom tilewright_kit.rooms import door\n"
    assert list(missing(text)) == ["tilewright.nothing", "tilewright_kit.rooms.door"]
