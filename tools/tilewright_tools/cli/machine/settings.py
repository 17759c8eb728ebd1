"""Settings of the command line from the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["rerun_with_numpy_at_its_best"]

_HANDICAPS = ("OPENBLAS_CORETYPE",)
"""Variables that make OpenBLAS use older kernels than the CPU has: no fair peer."""


def rerun_with_numpy_at_its_best(arguments: Sequence[str]) -> int | None:
    """Run the command again where NumPy is not held back, and return its exit code; None if nothing holds it back."""
    held_back = [name for name in _HANDICAPS if os.environ.get(name)]
    if not held_back:
        return None
    env = {name: value for name, value in os.environ.items() if name not in held_back}
    return subprocess.run([sys.executable, "-m", "tilewright_tools.cli", *arguments], env=env, check=False).returncode
