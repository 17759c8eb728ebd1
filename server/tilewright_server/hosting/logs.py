"""The server's log on standard error."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from tilewright_server.protocol import log_lines

__all__ = ["set_up"]


def set_up(level: str, form: str, stream: TextIO | None = None) -> None:
    """Have all loggers write to ``stream``, standard error if it is None; again to change level and form."""
    root = logging.getLogger()
    logging.raiseExceptions = False
    handler = next((item for item in root.handlers if isinstance(item, log_lines.LogHandler)), None)
    if handler is None:
        handler = log_lines.LogHandler(stream or sys.stderr)
        root.addHandler(handler)
    handler.setFormatter(log_lines.formatter(form))
    log_lines.choose(form)
    root.setLevel(level.upper())
    for chatty in ("asyncio", "grpc"):
        logging.getLogger(chatty).setLevel(max(logging.INFO, root.level))
