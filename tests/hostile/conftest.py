"""The harness of ``tests/server/rpc``, and the client of ``tests/server/local``, for this folder too."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
SERVER = HERE.parent / "server"
CLIENT = HERE.parent / "client"
sys.path[:0] = [str(SERVER / "rpc"), str(SERVER / "local"), str(SERVER / "app"), str(CLIENT), str(HERE)]
