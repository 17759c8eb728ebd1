"""The loop of a process that compiles sources with a library, one after the other, for the server that started it.

    python -m tilewright_server.build.workers.nvrtc_worker MEMORY_BYTES NICENESS IDLE_S LIFELINE

Such a compiler lives in a process of its own, because one that crashes, hangs or eats memory must not harm the server.
Requests come on standard input, answers leave on standard output, both as frames: two 32-bit lengths (little endian), a
JSON object, a binary part. The process ends with its input, when nothing was asked for IDLE_S seconds, or with the
process at the other end of the pipe LIFELINE, whatever it is doing then.

Requests: ``{"ask": "identity"}`` is answered with ``state`` ``ok``, ``version``, ``library`` (path) and ``sha256``, or
with ``state`` ``missing`` and ``reason``. ``{"ask": "compile", "name": ..., "options": [...]}`` with the source as
binary part is answered at once with ``{"state": "started"}``, and then with ``state`` (``ok`` or ``failed``), ``log``
and the binary.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tilewright_server.build.workers.lifeline import end_with

__all__ = ["Compiler", "found", "read_frame", "serve", "write_frame"]

_LENGTHS = struct.Struct("<II")
_LOG_PART = 64 * 1024
"""Bytes kept of the beginning and of the end of a log."""


class Compiler(Protocol):
    """Interface of a worker's compiler module."""

    def identity(self) -> Mapping[str, Any]:
        """The answer to ``identity``, as ``found`` makes it. May raise anything, which means missing."""
        ...

    def compile_source(self, text: bytes, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """The device binary of a source, None if it was refused, and what the compiler said."""
        ...


def found(version: str, *libraries: str) -> dict[str, Any]:
    """The answer of a compiler that is there: the first library is watched for changes, all make the digest."""
    digest = hashlib.sha256()
    for library in libraries:
        with Path(library).open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return {"state": "ok", "version": version, "library": libraries[0], "sha256": digest.hexdigest()}


def serve(compiler: Compiler, arguments: Sequence[str]) -> int:
    """Answer until the input ends. Returns the exit status."""
    memory_bytes, niceness, idle_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    end_with(int(arguments[3]))
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    with suppress(OSError):
        os.nice(niceness)
        # Where the kernel schedules sessions as groups, niceness counts within the session only.
        Path("/proc/self/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    source = sys.stdin.buffer
    # What a library prints must not get between the frames.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while select.select([source], [], [], idle_s)[0]:
        frame = read_frame(source)
        if frame is None:
            break
        record, data = frame
        if record.get("ask") == "identity":
            write_frame(sink, _identity(compiler))
        else:
            write_frame(sink, {"state": "started"})
            options = [str(option) for option in record["options"]]
            binary, log = compiler.compile_source(data, str(record["name"]), options)
            write_frame(sink, {"state": "failed" if binary is None else "ok", "log": _cut(log)}, binary or b"")
    return 0


def _identity(compiler: Compiler) -> Mapping[str, Any]:
    try:
        return compiler.identity()
    except Exception as error:  # the libraries' packages raise what they like; the server needs the text only
        return {"state": "missing", "reason": f"{type(error).__name__}: {error}"[:2000]}


def read_frame(source: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next frame; None at the end of the input. Raises ``EOFError`` if it ends inside a frame."""
    head = source.read(_LENGTHS.size)
    if not head:
        return None
    lengths = _LENGTHS.unpack(_whole(head, _LENGTHS.size))
    text, data = (_whole(source.read(length), length) for length in lengths)
    record = json.loads(text)
    if not isinstance(record, dict):
        raise EOFError("not a frame")
    return record, data


def _whole(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise EOFError("the input ended inside a frame")
    return data


def write_frame(sink: BinaryIO, record: Mapping[str, Any], data: bytes = b"") -> None:
    text = json.dumps(record).encode()
    sink.write(_LENGTHS.pack(len(text), len(data)) + text + data)
    sink.flush()


def _cut(log: str) -> str:
    if len(log) <= 2 * _LOG_PART:
        return log
    return f"{log[:_LOG_PART]}\n... {len(log) - 2 * _LOG_PART} characters left out ...\n{log[-_LOG_PART:]}"
