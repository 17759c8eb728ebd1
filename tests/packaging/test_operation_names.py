"""The service, its tools and the client know no operation by name: operations bring what others say about them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tilewright_kit.loading.loader import PluginManager

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"attention", "conv", "convolution", "fmha", "gemm", "matmul"}
FACES = ("client/tilewright/operations", "client/tilewright/sync", "client/tilewright/aio", "client/tilewright/torch")
"""Typed methods of the client, and PyTorch's operations on top of them: thin faces of the generic call, under the names
of operations.
"""


def operation_names() -> set[str]:
    """Names of the installed operations and of their commands, and words that mean them."""
    manager = PluginManager()
    manager.load_entry_points()
    return set(manager.operations) | {entry.name for entry in entry_points(group="tilewright.commands")} | FAMILIES


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every name, attribute and string of a module but for docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
        if isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.lineno, node.value


def named(text: str, names: set[str]) -> set[str]:
    """The operations that a text names as words of their own. Lines that show a user a command are no knowledge."""
    shown = re.sub(r"tilewright (run|bench|describe|explain|kernels|serve|perf)\b.*", "", text)
    return {word for word in re.findall(r"[a-z][a-z0-9_]*", shown.lower()) if word in names}


@pytest.mark.parametrize("root", ["server", "tools", "client"])
def test_no_module_names_an_operation(root: str) -> None:
    names = operation_names()
    assert {"gemm", "conv_backward_data", "kv_append"} <= names
    found = [
        f"{path.relative_to(ROOT)}:{line}: {', '.join(sorted(hits))}"
        for path in sorted((ROOT / root).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(FACES)
        for line, text in words(path)
        if (hits := named(text, names))
    ]
    assert found == []


def test_a_planted_name_is_found() -> None:
    assert named("conv_backward_data", operation_names()) == {"conv_backward_data"}
    assert named("the gemm of it", operation_names()) == {"gemm"}
    assert named("tilewright run gemm 64 64 64", operation_names()) == set()
