"""The harness of ``tests/server/rpc``, and the client of ``tests/server/local``, for this folder too."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "rpc"), str(HERE.parent / "local"), str(HERE)]
