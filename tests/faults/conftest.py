"""The harnesses of the server's tests, for this folder too."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
SERVER = HERE.parent / "server"
CLIENT = HERE.parent / "client"
sys.path[:0] = [str(SERVER / "rpc"), str(SERVER / "local"), str(CLIENT), str(HERE)]
