"""The harness of ``tests/server/rpc``, for this folder too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "rpc"))
sys.path.insert(0, str(Path(__file__).parent))
