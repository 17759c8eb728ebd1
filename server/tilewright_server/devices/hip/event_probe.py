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
from collections.abc import Callable, Sequence
from typing import Any

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.hip.driver.api import HipApi
from tilewright_server.devices.hip.driver.driver import load_api
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Borrower", "ProbeError", "checked", "event_problem", "main", "open_api", "probed", "run_probe", "say"]

_PROBE = "tilewright_server.devices.hip.event_probe"
_BORROW = "borrow"
_RECORDS = 70
"""More than twice the signals that an interprocess event of ROCm has (32)."""
STEP_S = 5.0
"""A wait that has not returned by then blocks. Opening the runtime in the second process is given longer."""
START_S = 30.0
LIMIT_S = 60.0
LOOK_S = 0.02
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ProbeError(Exception):
    """The text is the problem."""


@functools.cache
def event_problem(ordinal: int) -> str:
    """Why launches are not tied by events on a device of this process' numbering; empty if events keep order. Starts
    two processes the first time, which takes a second or two."""
    return probed(_PROBE, ordinal, "interprocess events")


def probed(module: str, ordinal: int, what: str) -> str:
    """Run a module's probe of ``what`` in a process that ends. Returns the problem, or nothing."""
    try:
        done = subprocess.run(
            run_module(module, str(ordinal)), capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
        return str(json.loads(done.stdout)["problem"])
    except subprocess.TimeoutExpired:
        return f"the probe of {what} did not end"
    except (OSError, ValueError, KeyError, TypeError):
        return f"the probe of {what} failed"


def checked(answer: Any, doing: str) -> Any:
    if answer[0]:
        raise ProbeError(f"{doing} fails ({answer[0].name})")
    return answer[1] if len(answer) > 1 else None


def open_api(ordinal: int) -> HipApi:
    raw = load_api()
    checked(raw.hipInit(0), "the runtime's start")
    api = HipApi(raw)
    checked(api.make_current(ordinal), "the device's start")
    return api


class Borrower:
    """The second process, by line."""

    def __init__(self, module: str, ordinal: int, name: str, files: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            run_module(module, str(ordinal), _BORROW, name),
            pass_fds=files,
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
    api = open_api(ordinal)
    released = threading.Event()
    hold = HOST_FUNCTION(lambda _: (released.wait(LIMIT_S), None)[1])
    stream = checked(api.new_stream(), "a stream")
    result, event, name = api.new_shared_event()
    checked((result,), "making an interprocess event")
    checked(api.raw.hipLaunchHostFunc(stream, ctypes.cast(hold, ctypes.c_void_p).value, None), "a host function")
    checked(api.record_event(event, stream), "recording an interprocess event")
    borrower = Borrower(_PROBE, ordinal, name.hex())
    try:
        borrower.expect("opened", START_S, "opening an interprocess event does not return")
        borrower.expect("busy", STEP_S, "a query of a pending interprocess event blocks")
        borrower.expect("queued", STEP_S, "a wait for a pending interprocess event blocks the caller")
        borrower.expect("ordered", STEP_S, "a stream that waits for an interprocess event cannot be asked")
        released.set()
        borrower.expect("passed", STEP_S, "a wait for an interprocess event does not end with its record")
        for turn in range(_RECORDS):
            doing = f"record {turn + 2} of an interprocess event"
            checked(api.record_event(event, stream), doing)
            checked(api.wait_stream(stream), doing)
            borrower.tell()
            borrower.expect("passed", STEP_S, f"a wait for {doing} does not end")
    finally:
        released.set()
        borrower.process.kill()
        borrower.process.wait()


def _borrow(ordinal: int, name: str) -> None:
    """The process that opens the event. Raises ``ProbeError``, for the line that it says last."""
    api = open_api(ordinal)
    event = checked(api.open_event(bytes.fromhex(name)), "opening an interprocess event")
    stream = checked(api.new_stream(), "a stream")
    say("opened")
    if not api.query_event(event)[0]:
        raise ProbeError("an interprocess event reports success while its stream is busy")
    say("busy")
    checked(api.raw.hipStreamWaitEvent(stream, event, 0), "a wait for a pending interprocess event")
    say("queued")
    time.sleep(LOOK_S)
    if not api.query_stream(stream)[0]:
        raise ProbeError("a stream does not wait for an interprocess event")
    say("ordered")
    checked(api.wait_stream(stream), "the end of a wait for an interprocess event")
    say("passed")
    for turn in range(_RECORDS):
        if not sys.stdin.buffer.readline():
            return
        doing = f"a wait for record {turn + 2} of an interprocess event"
        checked(api.raw.hipStreamWaitEvent(stream, event, 0), doing)
        checked(api.wait_stream(stream), doing)
        say("passed")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_probe(lend: Callable[[int], None], borrow: Callable[[int, str], None]) -> int:
    """Probe, or be the second process. Always returns 0: what failed is in what is printed."""
    ordinal, more = int(sys.argv[1]), sys.argv[2:]
    problem = ""
    try:
        if more:
            borrow(ordinal, more[1])
            return 0
        lend(ordinal)
    except (ProbeError, TilewrightError, RuntimeError) as error:
        problem = str(error)
    say(problem if more else json.dumps({"problem": problem}))
    return 0


def main() -> int:
    """Probe events, or be the second process."""
    return run_probe(_lend, _borrow)


if __name__ == "__main__":
    sys.exit(main())
