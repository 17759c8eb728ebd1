"""``python -m tilewright_server.devices.worker CONTROL EVENTS AREA FORM``: descriptors that a server has passed on, and
the form of its log, which is this process' too."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import signal
import socket
import sys

from tilewright_server.devices.worker.exchange.shared_area import Area
from tilewright_server.devices.worker.host import serve
from tilewright_server.protocol.log_lines import LogHandler, formatter

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the server's end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A signal for the whole group is the server's business: it drains, and then closes its connections.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    handler = LogHandler(sys.stderr)
    handler.setFormatter(formatter(sys.argv[4], "device process"))
    logging.basicConfig(level="INFO", handlers=[handler])
    control, events, area = (int(text) for text in sys.argv[1:4])
    shared = Area(area)
    shared.close_fd()
    serve(socket.socket(fileno=control), socket.socket(fileno=events), shared)


if __name__ == "__main__":
    main()
