"""How product code and documents are written: docstrings open with a noun or a verb, lines of documents wrap."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FINISHED = ("arch", "bench", "client", "emulator", "native", "plugins", "scripts", "server", "tools")
"""Source roots in which no docstring opens with one of the words."""
OPENER = re.compile(r"^\s*(?://+\s*)?(What|Of|Who|Whose|Whether)\b")
COLUMNS = 100
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, also those of attributes, and of comments that open a header."""
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, node.value.value
        return
    before = ""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("//") and not before.lstrip().startswith("//"):
            yield number, line
        before = line


def long_lines(text: str) -> Iterator[int]:
    """Numbers of lines that could wrap: no code, no table, more than one word."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith(("|", "    ", "#")) and len(line) > COLUMNS and " " in line.strip():
            yield number


@pytest.mark.parametrize("root", FINISHED)
@pytest.mark.extended
def test_no_docstring_opens_with_a_question_word(root: str) -> None:
    files = [path for pattern in ("*.py", "*.h", "*.hpp", "*.cpp") for path in sorted((ROOT / root).rglob(pattern))]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in files
        for line, text in texts(path)
        if OPENER.match(text)
    ]
    assert files and wrong == []


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.stem)
def test_lines_of_documents_wrap(path: Path) -> None:
    assert list(long_lines(path.read_text("utf-8"))) == []


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md"], ids=lambda path: path.stem)
def test_the_original_system_goes_by_its_name(path: Path) -> None:
    assert re.findall(r"\bthe seeds\b", path.read_text("utf-8")) == []


def test_openers_are_found_where_they_stand(tmp_path: Path) -> None:
    module, header = tmp_path / "module.py", tmp_path / "header.hpp"
    module.write_text('"""Good."""\nx = 1\n"""What it holds."""\n\n\ndef f():\n    """Whether it is."""\n')
    header.write_text("// Of tiles,\n// Whose rows\nint a;\n// Good\n")
    found = [(path.name, line) for path in (module, header) for line, text in texts(path) if OPENER.match(text)]
    assert found == [("module.py", 3), ("module.py", 7), ("header.hpp", 1)]


def test_code_and_tables_may_be_long() -> None:
    long = "word " * 30
    assert list(long_lines(f"{long}\n| {long} |\n```\n{long}\n```\n")) == [1]
