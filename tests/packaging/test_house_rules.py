"""Rules that a reader of one file cannot see: who reads the environment, how long modules grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("arch", "client", "emulator", "native", "plugins", "server", "tools")
# Packages that the base install does not have.
SERVER_ONLY = {"pluggy", "typer", "rich", "platformdirs", "grpc_health", "grpc_reflection"}
LONGEST = 450


def modules(root: str, pattern: str = "*.py") -> list[Path]:
    return sorted((ROOT / root).rglob(pattern))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_client_needs_none_of_the_servers_packages() -> None:
    offences = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("client")
        for name in imported(path)
        if name in SERVER_ONLY
    ]
    assert not offences


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_environment_is_read_in_settings_modules_only(root: str) -> None:
    offences = []
    for path in modules(root):
        if path.name == "settings.py" or path.parent.name == "settings":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
                offences.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offences


@pytest.mark.parametrize("root", [*SOURCE_ROOTS, "bench", "examples", "tests"])
def test_modules_stay_short_enough_to_read(root: str) -> None:
    files = [path for pattern in ("*.py", "*.hpp", "*.h", "*.cpp") for path in modules(root, pattern)]
    long = {
        str(path.relative_to(ROOT)): count for path in files if (count := len(path.read_text().splitlines())) > LONGEST
    }
    assert not long


@pytest.mark.parametrize("figure", ["units", "clock_mhz"])
def test_what_stands_in_for_a_figure_that_no_spec_states_is_said_once(figure: str) -> None:
    """``units_of`` and ``clock_of`` of the kit."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules("plugins")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
        if isinstance(node.values[0], ast.Attribute) and node.values[0].attr == figure
    ]
    assert [place.partition(":")[0] for place in found] == ["plugins/kit/tilewright_kit/tiles/cost/units.py"], found
