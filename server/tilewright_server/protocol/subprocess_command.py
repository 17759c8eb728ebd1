"""Processes that the server starts to run a module of its own."""

from __future__ import annotations

import sys

__all__ = ["run_module"]

_START = """
import sys
sys.path[:] = [entry for entry in sys.argv.pop(1).split(":") if entry]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run_module(name: str, *arguments: str) -> list[str]:
    """The command for ``python -m name arguments`` in a process that sees the modules that this one sees, and nothing
    of the folder that the server happens to be started in, which may be anybody's."""
    return [sys.executable, "-c", _START, ":".join(sys.path), name, *arguments]
