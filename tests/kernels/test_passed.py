"""The record of tests that are not run again: what it depends on is all that they read."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import content
from passed import FILES, MARKS, ROOT, SUFFIXES, reads

pytestmark = pytest.mark.extended
PACKAGES = ("arch", "emulator", "native", "plugins/*", "proto", "server", "tools", "client")
CONFTEST = """
import sys
from pathlib import Path
sys.path.append({helpers!r})
import passed
passed.ROOT = Path(__file__).parent
passed.RECORD = passed.ROOT / "passed.json"
passed.FILES = {{"test_some.py": ("sources",)}}

def pytest_addoption(parser):
    parser.addoption("--record", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "extended: rest")
    config.addinivalue_line("markers", "exhaustive: none")
    if config.getoption("record"):
        config.pluginmanager.register(passed.Recorder(config))

def pytest_configure_node(node):
    node.workerinput["passed"] = passed.as_they_stand(node.config)

def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        passed.state = None  # workers are told, and find nothing out themselves
    passed.leave_out(config, items)
"""
TESTS = """
import pytest
from pathlib import Path

@pytest.mark.extended
def test_it():
    assert "bug" not in (Path(__file__).parent / "sources" / "kernel.hpp").read_text()

def test_of_every_run():
    pass
"""


@functools.cache
def sources() -> dict[str, Path]:
    """Files by the dotted names under which they are imported; helpers of tests by their own."""
    found = {path.stem: path for path in sorted((ROOT / "tests").rglob("*.py"))}
    for pattern in PACKAGES:
        for root in ROOT.glob(pattern):
            for path in root.glob("tilewright*/**/*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(path: Path) -> frozenset[Path]:
    """Modules of the project that a module imports, wherever in it, and the packages above them."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            own = path.with_name(f"{parts[0]}.py")  # of helpers of one name, the one beside the test
            yield from (own if own.exists() else sources()[each] for each in above if each in sources())


def all_imports(path: Path) -> set[Path]:
    seen: set[Path] = set()
    left = [path, *(folder / "conftest.py" for folder in path.parents[:2])]
    while left:
        module = left.pop()
        if module.exists() and module not in seen:
            seen.add(module)
            left += imports(module)
    return seen


def test_all_that_recorded_tests_import_is_part_of_their_digest() -> None:
    of_others = (ROOT / "client", ROOT / "proto")  # `tests/conftest.py` imports the client for the sake of other tests
    for file in FILES:
        places = [ROOT / place for place in reads(file)]
        assert all(place.exists() for place in places), file
        known = (*places, *of_others)
        outside = [path for path in sorted(all_imports(ROOT / file)) if not any(map(path.is_relative_to, known))]
        assert not outside, file


def test_every_kind_of_source_is_part_of_the_digest() -> None:
    made = {".typed", ".pyc", ".so", ".lock", ""}
    for place in sorted({place for file in FILES for place in reads(file)}):
        kinds = {
            path.suffix for path in (ROOT / place).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        }
        assert kinds <= SUFFIXES | made, place


WORDS = '''
"""A module."""
# A comment
LIMIT = 1  # of some kind
"""Its unit."""
def f(x="# no comment"):
    """Return it.

    At length.
    """
    return """kept""", x
'''


def test_prose_of_python_is_no_part_of_the_digest(tmp_path: Path) -> None:
    path, kernel = tmp_path / "a.py", tmp_path / "a.hpp"
    path.write_text(WORDS)
    assert " ".join(content(path).decode().split()) == 'LIMIT = 1 def f(x="# no comment"): return """kept""", x'
    for one, other in ("LIMIT = 1", "LIMIT = 2"), ("kept", "kept # too"), ("no comment", "comment"):
        before = content(path)
        path.write_text(WORDS.replace(one, other))
        assert content(path) != before
        path.write_text(WORDS)
    kernel.write_text("// bytes\n")
    assert content(kernel) == b"// bytes\n"


def run(folder: Path, *options: str) -> str:
    """pytest's closing line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, "test_some.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.splitlines()[-1]


def test_tests_that_passed_are_skipped_until_something_that_they_read_changes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(helpers=str(Path(__file__).parent)))
    (tmp_path / "test_some.py").write_text(TESTS)
    kernel, record = tmp_path / "sources" / "kernel.hpp", tmp_path / "passed.json"
    kernel.parent.mkdir()
    kernel.write_text("bug")
    assert "1 failed" in run(tmp_path, "--record")
    assert not record.exists(), "what failed is not recorded"
    kernel.write_text("right")
    assert "1 passed" in run(tmp_path, "-k", "it", "--record")
    assert not record.exists(), "a part of a file is not recorded"
    assert "1 passed" in run(tmp_path, "--record")
    assert list(json.loads(record.read_text())) == ["test_some.py"]
    assert "1 skipped" in run(tmp_path)
    assert "1 skipped" in run(tmp_path, "-n", "1")
    kernel.write_text("bug")
    assert "1 failed" in run(tmp_path, "-n", "1")
    assert "1 failed" in run(tmp_path)
