"""Rules that a reader of one file cannot see: who imports whom, who reads the environment, how long modules grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Package: (source root, packages of ours that it may import besides itself).
MAY_IMPORT = {
    "tilewright_arch": ("arch", set()),
    "tilewright_kit": ("plugins/kit", {"tilewright_arch"}),
    "tilewright_gemm": ("plugins/gemm", {"tilewright_kit", "tilewright_arch", "tilewright_native"}),
    "tilewright_native": ("native", set()),
    "tilewright_server": ("server", {"tilewright_kit", "tilewright_arch", "tilewright_proto", "tilewright_native"}),
    "tilewright": ("client", {"tilewright_proto"}),
}
# The command line is a client that happens to start servers.
EXTRA = {"tilewright_server/cli": {"tilewright"}}
# Modules whose import does I/O, opens drivers or starts threads may not be needed by the base package.
SERVER_ONLY = {"pluggy", "typer", "rich", "platformdirs", "grpc_health", "grpc_reflection"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / MAY_IMPORT[package][0] / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_go_downwards(package: str) -> None:
    offences = []
    for path in modules(package):
        allowed = {package} | MAY_IMPORT[package][1]
        for part, more in EXTRA.items():
            if f"/{part}/" in str(path):
                allowed = allowed | more
        offences += [
            f"{path.relative_to(ROOT)}: {name}" for name in imported(path) if name in MAY_IMPORT and name not in allowed
        ]
    assert not offences


def test_client_needs_none_of_the_servers_packages() -> None:
    offences = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("tilewright")
        for name in imported(path)
        if name in SERVER_ONLY
    ]
    assert not offences


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_environment_is_read_in_settings_modules_only(package: str) -> None:
    offences = []
    for path in modules(package):
        if path.name == "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
                offences.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offences


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_modules_stay_short_enough_to_read(package: str) -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in modules(package)
        if (count := len(path.read_text().splitlines())) > 450
    }
    assert not long
