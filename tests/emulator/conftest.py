"""Fixtures of the emulator's tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests are imported by path: the package and the helpers are found here
sys.path.insert(1, str(HERE.parent / "native"))  # the compiler for AMD units, and GEMM calls with their truth
sys.path += [str(HERE.parent / "fmha"), str(HERE.parent / "kernels")]  # kernels of attention as they are planned
