"""A server of its own for each script."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

__all__ = ["serving"]


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Start a server with an empty cache and yield its target. ``flags``: more of ``tilewright serve``."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{folder}/s"
        listen = ["--listen", target, "--cache-dir", f"{folder}/cache", "--log-level", "warning"]
        command = [sys.executable, "-m", "tilewright_tools.cli", "serve", *listen, *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit("the server did not start")
            try:
                yield target
            finally:
                server.terminate()
