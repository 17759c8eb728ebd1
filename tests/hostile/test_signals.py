"""Signals that are no order to end."""

from __future__ import annotations

import signal
from pathlib import Path

from hostile_servers import bystander_lives
from rpc_harness import ServerProcess, eventually


def test_the_end_of_a_terminal_is_not_the_end_of_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        server.signal(signal.SIGHUP)
        assert eventually(lambda: "settings are not read again" in server.log())
        bystander_lives(server.addresses[0])
        assert server.stop() == 0
