"""Logs that cannot be written: a full disk, a reader that does not read. Nobody waits, and what is lost is counted."""

from __future__ import annotations

import errno
import io
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from rpc_harness import Client, ServerProcess, eventually, inline

from tilewright_server.protocol.log_lines import MOST_WAITING, LogHandler

FULL = Path("/dev/full")


def logger(stream: io.TextIOBase) -> tuple[logging.Logger, LogHandler]:
    handler = LogHandler(stream, complete=True)  # type: ignore[arg-type]
    made = logging.Logger("test")
    made.addHandler(handler)
    return made, handler


class Disk(io.StringIO):
    """A file of a disk that may be full."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_that_a_full_disk_took_not_are_counted_when_it_has_room_again() -> None:
    disk = Disk()
    log, handler = logger(disk)
    for number in range(5):
        log.info("line %d", number)
        handler.flush()
    assert disk.getvalue() == ""
    disk.full = False
    log.info("after")
    handler.flush()
    assert disk.getvalue().splitlines()[0] == "after"
    assert "5 lines of the log were dropped" in disk.getvalue()


def test_a_reader_that_does_not_read_keeps_nobody_waiting_and_memory_bounded() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        log, handler = logger(stream)
        begin = time.monotonic()
        for _ in range(3 * MOST_WAITING):
            log.info("x" * 100)
        assert time.monotonic() - begin < 60
        assert len(handler._lines) <= MOST_WAITING
        found = bytearray()

        def read() -> None:
            while data := os.read(reading, 1 << 16):
                found.extend(data)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        log.info("last")
        assert eventually(lambda: b"lines of the log were dropped" in found)
        log.removeHandler(handler)
        handler.flush()
    thread.join(30)
    os.close(reading)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_a_server_serves_whose_audit_log_is_on_a_full_disk(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, audit_log=FULL) as server:
        for _ in range(20):
            with Client(server.addresses[0]) as client:
                client.copy(inline(bytes(64)))
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def test_a_log_that_is_closed_leaves_nothing_that_cannot_be_written() -> None:
    """The interpreter flushes standard error at its end, and ends with status 120 where that fails."""
    with FULL.open("w") as stream:
        handler = LogHandler(stream)
        stream.buffer.write(b"what a full disk did not take")
        handler.close()
        stream.flush()
