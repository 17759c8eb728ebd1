"""Logs of the server and of the processes of devices: text or JSON, with the request that a line is of, at most so many
lines of a kind, never in anybody's way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from tilewright_server.protocol.request_ids import current

__all__ = ["JsonFormatter", "LogHandler", "choose", "chosen", "formatter"]

MOST_WAITING = 4096
"""Lines that may wait for a slow reader; more are dropped, and counted."""
BURST = 20
WINDOW_S = 10.0
MOST_KINDS = 512
FLUSH_S = 1.0
PROMPT_S = 0.05

_FORM = ["text"]


def choose(form: str) -> None:
    """Note the form of this process' log, for those that it starts."""
    _FORM[0] = form


def chosen() -> str:
    """The form that was noted last, ``text`` or ``json``."""
    return _FORM[0]


def formatter(form: str, source: str = "") -> logging.Formatter:
    """The formatter of a form. ``source`` says who writes, where several write to the same place."""
    return JsonFormatter(source) if form == "json" else TextFormatter(source)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    """Fields of a line. It is made in the thread that logs, so the request is the one that this thread serves."""
    fields: Mapping[str, object] = getattr(record, "fields", None) or {}
    if "request" not in fields and (request := current()):
        return {**fields, "request": request}
    return fields


class TextFormatter(logging.Formatter):
    """One line for people: time, level, logger, message, fields as ``name=value``."""

    def __init__(self, source: str = "") -> None:
        who = f" ({source})" if source else ""
        super().__init__(f"%(asctime)s %(levelname)s %(name)s{who}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return " ".join(
            [super().formatMessage(record), *(f"{name}={value}" for name, value in _fields(record).items())]
        )


class JsonFormatter(logging.Formatter):
    """One JSON object on a line, with the time in UTC."""

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._source = {"source": source} if source else {}

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._source,
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class Rate:
    """At most ``BURST`` lines of a kind in ``WINDOW_S`` seconds; errors are never left out. Used under a lock."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int, str], list[float]] = {}
        """By logger, level and text before its values were put in: lines in the window, its start, lines left out."""

    def admit(self, record: logging.LogRecord, now: float) -> int | None:
        """None if the line is left out; else how many like it were left out before."""
        if record.levelno >= logging.ERROR or record.levelno <= logging.DEBUG:
            return 0
        key = (record.name, record.levelno, str(record.msg))
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            found = self._kinds[key] = [0, now, 0]
        if now - found[1] >= WINDOW_S:
            found[0], found[1] = 0, now
        if found[0] >= BURST:
            found[2] += 1
            return None
        found[0] += 1
        left_out, found[2] = int(found[2]), 0
        return left_out


class LogHandler(logging.Handler):
    """Writes from a thread of its own: whoever logs does not wait for a reader that does not read, or a full disk."""

    def __init__(self, stream: TextIO, *, complete: bool = False) -> None:
        """``complete``: no line is left out for being like many others."""
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._dropped = 0
        self._rate = None if complete else Rate()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            left_out = self._rate.admit(record, time.monotonic()) if self._rate is not None else 0
            if left_out is None:
                return
            line = self.format(record)
            if left_out:
                note = logging.LogRecord(
                    record.name, record.levelno, "", 0, "%d like the next were left out", (left_out,), None
                )
                line = f"{self.format(note)}\n{line}"
        except Exception:  # a line that cannot be made must not end what it is about
            return
        with self._changed:
            if len(self._lines) >= MOST_WAITING:
                self._dropped += 1
                return
            idle = not self._lines and not self._writing
            self._lines.append(line)
            self._changed.notify_all()
            if idle and record.levelno >= logging.WARNING:  # seen before what follows it, unless the reader is slow
                self._changed.wait_for(lambda: not self._lines and not self._writing, PROMPT_S)
        if record.levelno >= logging.CRITICAL:  # the process may end right after
            self.flush()

    def flush(self) -> None:
        """Wait until all is written, for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, FLUSH_S)

    def close(self) -> None:
        """Write what waits. Where it is not taken, what the stream still holds is lost: the interpreter would try once
        more at its end, and end with status 120 for it.
        """
        self.flush()
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, self._stream.fileno())
                os.close(sink)
                self._stream.flush()
        super().close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._lines))
                lines = list(self._lines)
                self._lines.clear()
                dropped, self._dropped = self._dropped, 0
                self._writing = True
            count = len(lines) + dropped
            if dropped:
                lines.append(f"({dropped} lines of the log were dropped: they could not be written in time)")
            try:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # a full disk, or a reader that has gone
                with self._changed:
                    self._dropped += count
