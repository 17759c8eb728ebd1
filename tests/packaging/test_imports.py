"""Which package may import which: the table of the design, checked on every module that is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED: dict[str, tuple[str, frozenset[str]]] = {
    "tilewright_arch": ("arch", frozenset()),
    "tilewright_kit": ("plugins/kit", frozenset({"tilewright_arch"})),
    "tilewright_gemm": ("plugins/gemm", frozenset({"tilewright_kit", "tilewright_arch"})),
    "tilewright_grouped_conv": ("plugins/grouped_conv", frozenset({"tilewright_kit", "tilewright_arch"})),
    "tilewright_fmha": ("plugins/fmha", frozenset({"tilewright_kit", "tilewright_arch"})),
    "tilewright_moe": ("plugins/moe", frozenset({"tilewright_gemm", "tilewright_kit", "tilewright_arch"})),
    "tilewright_native": ("native", frozenset()),
    "tilewright_proto": ("proto", frozenset()),
    "tilewright_server": (
        "server",
        frozenset({"tilewright_kit", "tilewright_arch", "tilewright_proto", "tilewright_native"}),
    ),
    "tilewright": ("client", frozenset({"tilewright_proto", "tilewright_native"})),
    "tilewright_tools": (
        "tools",
        frozenset({"tilewright", "tilewright_kit", "tilewright_arch", "tilewright_proto", "tilewright_native"})
        | {"tilewright_server"},
    ),
    "tilewright_emulator": ("emulator", frozenset({"tilewright_kit", "tilewright_tools"})),
}
"""Package to its source root and what of ours it may import beside itself."""

DRIVERS = frozenset({"cuda", "hip", "cupy", "torch", "pycuda", "pynvml"})
"""Never at the top of a module: importing the package touches no driver."""


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and first name of every import, also inside functions and for checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, package if node.level else (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value.split(".")[0]


OPERATIONS_OF_TORCH = ROOT / "client" / "tilewright" / "torch"
"""The package of operations of PyTorch."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / ALLOWED[package][0] / package).rglob("*.py"))


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_the_design_allows(package: str) -> None:
    wrong = []
    for path in modules(package):
        for line, name in imported(ast.parse(path.read_text("utf-8")), package):
            ours = name in ALLOWED or name.startswith("tilewright")
            if ours and name != package and name not in ALLOWED[package][1]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_pytorch_is_imported_only_by_those_who_ask_for_its_operations() -> None:
    for path in modules("tilewright"):
        if OPERATIONS_OF_TORCH not in path.parents:
            assert "tilewright.torch" not in path.read_text("utf-8"), path


@pytest.mark.parametrize("package", ALLOWED)
def test_no_module_imports_a_driver_at_its_top(package: str) -> None:
    wrong = []
    for path in modules(package):
        drivers = DRIVERS - {"torch"} if OPERATIONS_OF_TORCH in path.parents else DRIVERS
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {name for _, name in imported(node, package)}
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno} imports {name}" for name in names & drivers]
    assert wrong == []


def test_every_package_under_a_source_root_is_in_the_table() -> None:
    roots = {ROOT / root for root, _ in ALLOWED.values()} | set((ROOT / "plugins").iterdir())
    found = {path.parent.name for root in roots if root.is_dir() for path in root.glob("*/__init__.py")}
    assert {name for name in found if name.startswith("tilewright")} <= set(ALLOWED)


def test_the_walk_sees_every_kind_of_import() -> None:
    text = """
import tilewright_kit.contract.plan
from tilewright_arch import load
from . import here
def f():
    from tilewright_server.engine import x
    importlib.import_module("tilewright_gemm.plugin")
"""
    assert [name for _, name in sorted(imported(ast.parse(text), "own"))] == [
        "tilewright_kit", "tilewright_arch", "own", "tilewright_server", "tilewright_gemm",
    ]  # fmt: skip
