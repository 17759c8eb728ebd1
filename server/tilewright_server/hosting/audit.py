"""The audit log: who did what, with which result, one JSON object on a line."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.endpoints.rpc.transport.traffic import AUDIT_LOGGER
from tilewright_server.protocol.log_lines import JsonFormatter, LogHandler

__all__ = ["open_audit_log"]


def open_audit_log(path: Path | None) -> None:
    """Have the audit's lines go to the end of a file, of mode 0600 if it is new, or nowhere. Called again, it opens the
    file anew: the old one may have been moved away.

    Raises ``InvalidArgumentError`` if it cannot be written.
    """
    audit = logging.getLogger(AUDIT_LOGGER)
    audit.propagate = False
    stream = None
    if path is not None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidArgumentError(
                f"the audit log cannot be written: {error.strerror}",
                field="audit_log",
                value=str(path),
                rule="audit_log",
                fix="name a file in a folder that the server's user may write",
            ) from error
        stream = os.fdopen(descriptor, "w", encoding="utf-8")
    for old in audit.handlers[:]:
        audit.removeHandler(old)
        old.close()
    audit.setLevel(logging.INFO if stream is not None else logging.CRITICAL)
    if stream is not None:
        handler = LogHandler(stream, complete=True)
        handler.setFormatter(JsonFormatter())
        audit.addHandler(handler)
