"""Fixtures of the emulator's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path: the package is found here
