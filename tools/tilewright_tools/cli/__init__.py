"""The command line: `tilewright`, also `python -m tilewright_tools.cli`.

Nothing heavy is imported here: the script also exists where only the client is installed, and then says how to get the
rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]

_NEEDED = ("typer", "rich", "pluggy", "platformdirs", "grpc_health", "grpc_reflection")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see ``exits``)."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"error: the command line and the server need packages that are not installed: {', '.join(missing)}\n"
            "  Fix: pip install 'tilewright[server]'\n"
        )
        return 2
    from tilewright_tools.cli.entry import run

    return run(sys.argv[1:] if arguments is None else arguments)
