"""Probe of interprocess events: do they order the streams of two processes with this very runtime?

    python -m tilewright_server.devices.hip.event_probe ORDINAL

prints one JSON object: ``problem``, empty if events may be used. ROCm 6.3 to 7.2 fail one or another of its steps: an
opened event that reports success on a busy stream, a wait that blocks the caller, a wait that does not wait, an event
that fails from its 33rd record on. Two processes take part, since each loses an event in its own way; both end at once.
"""

from __future__ import annotations

import ctypes
import functools
import json
import select
import subprocess
import sys
import threading
import time
from typing import Any

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.hip.driver.api import HipApi
from tilewright_server.devices.hip.driver.driver import load_api
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["event_problem", "main"]

_PROBE = "tilewright_server.devices.hip.event_probe"
_BORROW = "borrow"
_RECORDS = 70
"""More than twice the signals that an interprocess event of ROCm has (32)."""
_STEP_S = 5.0
"""A wait that has not returned by then blocks. Opening the runtime in the second process is given longer."""
_START_S = 30.0
_LIMIT_S = 60.0
_LOOK_S = 0.02
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ProbeError(Exception):
    """The text is the problem."""


@functools.cache
def event_problem(ordinal: int) -> str:
    """Why launches are not tied by events on a device of this process' numbering; empty if events keep order. Starts
    two processes the first time, which takes a second or two."""
    try:
        done = subprocess.run(
            run_module(_PROBE, str(ordinal)), capture_output=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
        return str(json.loads(done.stdout)["problem"])
    except subprocess.TimeoutExpired:
        return "the probe of interprocess events did not end"
    except (OSError, ValueError, KeyError, TypeError):
        return "the probe of interprocess events failed"


def _value(answer: Any, doing: str) -> Any:
    if answer[0]:
        raise ProbeError(f"{doing} fails ({answer[0].name})")
    return answer[1] if len(answer) > 1 else None


def _api(ordinal: int) -> HipApi:
    raw = load_api()
    _value(raw.hipInit(0), "the runtime's start")
    api = HipApi(raw)
    _value(api.make_current(ordinal), "the device's start")
    return api


class _Borrower:
    """The second process, by line."""

    def __init__(self, ordinal: int, name: bytes) -> None:
        self.process = subprocess.Popen(
            run_module(_PROBE, str(ordinal), _BORROW, name.hex()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a line that was read ahead would not be seen to have come
        )

    def expect(self, said: str, seconds: float, late: str) -> None:
        """Read a line. Raises ``ProbeError`` if it is another or does not come in time."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise ProbeError(late)
        line = self.process.stdout.readline().decode().strip()
        if line != said:
            raise ProbeError(line or "the second process of the probe ended")

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


def _lend(ordinal: int) -> None:
    """The process whose event it is. Raises ``ProbeError``."""
    api = _api(ordinal)
    released = threading.Event()
    hold = _HOST_FUNCTION(lambda _: (released.wait(_LIMIT_S), None)[1])
    stream = _value(api.new_stream(), "a stream")
    result, event, name = api.new_shared_event()
    _value((result,), "making an interprocess event")
    _value(api.raw.hipLaunchHostFunc(stream, ctypes.cast(hold, ctypes.c_void_p).value, None), "a host function")
    _value(api.record_event(event, stream), "recording an interprocess event")
    borrower = _Borrower(ordinal, name)
    try:
        borrower.expect("opened", _START_S, "opening an interprocess event does not return")
        borrower.expect("busy", _STEP_S, "a query of a pending interprocess event blocks")
        borrower.expect("queued", _STEP_S, "a wait for a pending interprocess event blocks the caller")
        borrower.expect("ordered", _STEP_S, "a stream that waits for an interprocess event cannot be asked")
        released.set()
        borrower.expect("passed", _STEP_S, "a wait for an interprocess event does not end with its record")
        for turn in range(_RECORDS):
            doing = f"record {turn + 2} of an interprocess event"
            _value(api.record_event(event, stream), doing)
            _value(api.wait_stream(stream), doing)
            borrower.tell()
            borrower.expect("passed", _STEP_S, f"a wait for {doing} does not end")
    finally:
        released.set()
        borrower.process.kill()
        borrower.process.wait()


def _borrow(ordinal: int, name: bytes) -> None:
    """The process that opens the event. Raises ``ProbeError``, for the line that it says last."""
    api = _api(ordinal)
    event = _value(api.open_event(name), "opening an interprocess event")
    stream = _value(api.new_stream(), "a stream")
    _say("opened")
    if not api.query_event(event)[0]:
        raise ProbeError("an interprocess event reports success while its stream is busy")
    _say("busy")
    _value(api.raw.hipStreamWaitEvent(stream, event, 0), "a wait for a pending interprocess event")
    _say("queued")
    time.sleep(_LOOK_S)
    if not api.query_stream(stream)[0]:
        raise ProbeError("a stream does not wait for an interprocess event")
    _say("ordered")
    _value(api.wait_stream(stream), "the end of a wait for an interprocess event")
    _say("passed")
    for turn in range(_RECORDS):
        if not sys.stdin.buffer.readline():
            return
        doing = f"a wait for record {turn + 2} of an interprocess event"
        _value(api.raw.hipStreamWaitEvent(stream, event, 0), doing)
        _value(api.wait_stream(stream), doing)
        _say("passed")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Probe, or be the second process. Always returns 0: what failed is in what is printed."""
    ordinal, more = int(sys.argv[1]), sys.argv[2:]
    problem = ""
    try:
        if more:
            _borrow(ordinal, bytes.fromhex(more[1]))
            return 0
        _lend(ordinal)
    except (ProbeError, TilewrightError, RuntimeError) as error:
        problem = str(error)
    _say(problem if more else json.dumps({"problem": problem}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
