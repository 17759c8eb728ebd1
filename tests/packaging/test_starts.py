"""Starts stay quick: the modules that one loads are counted, not timed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import tilewright as tw

ROOT = Path(__file__).parents[2]
_SERVE = """
import sys
from tilewright_server.app import Application
from tilewright_tools.cli import main

def ready(self):
    sys.stdout.write(" ".join(sys.modules))
    sys.stdout.flush()
    self.stop()
    raise SystemExit(0)

Application._say_ready = ready
main(["serve", "--listen", "unix:" + sys.argv[1] + "/s", "--cache-dir", sys.argv[1] + "/cache"])
"""
MOST_SERVER_MODULES = 640
"""Loaded when a server says that it is ready; 626 today. More cost time at every start: import them where they are
used."""


def loaded(code: str, *arguments: str) -> list[str]:
    """Names of the modules that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout.split()


def packages(modules: list[str]) -> Counter[str]:
    return Counter(name.split(".")[0] for name in modules)


def test_importing_the_client_loads_no_library_and_no_flow() -> None:
    found = loaded("import tilewright, sys; print(*sys.modules)")
    assert not {"numpy", "grpc", "google", "asyncio", "ml_dtypes", "tilewright_proto"} & set(packages(found))
    assert [name for name in found if name.startswith("tilewright.")] == [
        "tilewright.session",
        "tilewright.session.settings",
    ]


def test_the_blocking_client_loads_nothing_of_asyncio() -> None:
    found = loaded("import tilewright, sys; tilewright.connect; print(*sys.modules)")
    assert "tilewright.sync.client" in found
    assert not [name for name in found if name.startswith(("tilewright.aio", "tilewright.torch"))]


def test_every_public_name_is_found_where_type_checkers_find_it() -> None:
    tree = ast.parse((ROOT / "client/tilewright/__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.col_offset]
    checked = {alias.name: node.module for node in imports for alias in node.names}
    assert checked == {**tw._PLACES, "aio": "tilewright"}
    assert sorted(checked) == sorted(tw.__all__)
    assert all(getattr(tw, name) is not None and name in dir(tw) for name in tw.__all__)
    assert not hasattr(tw, "no_such_name")


def test_a_server_starts_without_what_only_commands_and_later_requests_need(tmp_path: Path) -> None:
    found = loaded(_SERVE, str(tmp_path))
    assert {"tilewright_fmha", "tilewright_gemm", "tilewright_grouped_conv", "tilewright_moe"} <= set(found)
    assert not [name for name in found if name.startswith(("tilewright_fmha.", "tilewright_gemm."))]
    absent = {
        "pydantic",
        "rich",
        "typer",
        "sqlite3",
        "tarfile",
        "jsonschema",
        "cryptography",
        "multiprocessing",
        "numpy",
        "http",
        "tilewright",
        "torch",
        "onnx",
    }
    assert not absent & set(packages(found))
    assert len(found) <= MOST_SERVER_MODULES, packages(found).most_common(20)
