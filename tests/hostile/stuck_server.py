"""A server of the fake engine whose event thread waits for ever from SIGUSR1 on."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "rpc"))

from fake_engine import application

from tilewright_server import settings


def stick(server: Any) -> None:
    state: Any = server.rpc.server._state
    state.lock.acquire()  # by a thread that ends without giving it back


def main() -> int:
    server = application()(settings.load())
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=stick, args=(server,), daemon=True).start())
    return int(server.run())


if __name__ == "__main__":
    sys.exit(main())
