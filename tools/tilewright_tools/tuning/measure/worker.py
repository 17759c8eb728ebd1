"""The process that holds the device of a sweep: ``python -m tilewright_tools.tuning.measure.worker``.

It takes requests as JSON lines from standard input and answers each with one JSON line on what was standard output.
A kernel that crashes takes this process along, and one that hangs is ended with it; whoever started it goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tilewright_kit.commands.cases import Case
from tilewright_kit.contract.device import Device
from tilewright_kit.types.errors import InternalError, InvalidArgumentError, TilewrightError
from tilewright_server.engine.engine import Engine
from tilewright_tools.tuning.measure.clocks import Clocks
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.testbed import Stand
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.problems.families import family_named
from tilewright_tools.tuning.problems.prepared import prepared_request

__all__ = ["Worker", "main"]

_PR_SET_PDEATHSIG = 1
_LOST = ("device_lost", "device_closed")
_PAUSES_S = (0.2, 1.0)
"""Before a kernel is timed again whose time was taken under clocks that were held down."""


class Worker:
    """Answers requests, which are objects with a ``do``; one at a time."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._device: Device | None = None
        self._stand: Stand | None = None
        self._case: Case | None = None
        self._options = TimingOptions()
        self._clocks = Clocks("", "")
        self._handlers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "case": self._prepare,
            "measure": self._measure,
            "peer": self._peer,
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply: ``ok`` and what was asked for, or an ``error``. ``lost`` says that the device is gone."""
        try:
            handler = self._handlers.get(str(request.get("do")))
            if handler is None:
                raise InvalidArgumentError(
                    "there is no such request",
                    field="do",
                    value=request.get("do"),
                    rule="do",
                    fix="ask for one of " + ", ".join(self._handlers),
                )
            return {"ok": True, **handler(request)}
        except TilewrightError as error:
            record = {"code": error.code, "reason": error.reason, "rule": error.rule, "fix": error.fix}
            return {"ok": False, "error": record, "lost": error.rule in _LOST}
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            record = {"code": InternalError.code, "reason": reason, "rule": "worker", "fix": ""}
            return {"ok": False, "error": record, "lost": False}

    def close(self) -> None:
        self._drop()
        self._clocks.close()
        if self._engine is not None:
            self._engine.close()

    def _drop(self) -> None:
        stand, self._stand = self._stand, None
        if stand is not None:
            stand.close()

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the device."""
        self._engine = Setup.from_dict(request["setup"]).engine()
        self._device = device = self._engine.devices.get(str(request["device"]))
        self._clocks = Clocks(device.info.kind, str(device.info.attributes.get("pci", "")))
        told = self._engine.devices.diagnose().get(device.info.kind, {})
        return {"device": device.info.name, "driver": str(told.get("driver", ""))}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make the operands of a problem; the previous problem's go."""
        engine, device = self._require()
        self._drop()
        self._case = case = family_named(request["family"]).from_record(request["case"], "case")
        self._options = TimingOptions.from_dict(request["options"])
        asked, prepared = prepared_request(engine, device.info, case)
        problem = engine.operations[asked.operation].parse(asked)
        seed, check = int(request["seed"]), bool(request["check"])
        self._stand = Stand(engine, device, problem, case, self._options, seed=seed, check=check, prepared=prepared)
        return {"copies": self._stand.copies}

    def _measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Check and time one kernel."""
        engine, _ = self._require()
        stand = self._stand
        if stand is None:
            raise InternalError("no problem is prepared", rule="worker", fix="prepare one first")
        operation = engine.operations[str(request["operation"])]
        config = operation.config_type.from_dict(request["config"])
        check, verdict, throttled = bool(request["check"]), None, ""
        for pause in (*_PAUSES_S, 0.0):
            judged, timing = stand.time(
                config,
                check=check,
                limit_ns=float(request.get("limit_ns", 0.0)),
                samples=int(request["samples"]),
            )
            verdict, check = verdict or judged, False
            throttled = "" if timing is None else self._clocks.throttled()
            if not throttled:
                break
            timing = None
            time.sleep(pause)
        return {
            "error_norm": None if verdict is None else verdict.error,
            "wrong": "" if verdict is None else verdict.reason,
            "timing": None if timing is None else timing.to_dict(),
            "throttled": throttled,
            "clock_mhz": self._clocks.mhz(),
        }

    def _peer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Time the same problem with another library."""
        from tilewright_tools.tuning.measure.peer import time_peer

        _, device = self._require()
        if self._case is None or self._stand is None:
            raise InternalError("no problem is prepared", rule="worker", fix="prepare one first")
        timing, note = time_peer(
            str(request["name"]), device.info, self._case, self._stand.inputs, self._options, self._stand.copies
        )
        return {"timing": None if timing is None else timing.to_dict(), "note": note}

    def _require(self) -> tuple[Engine, Device]:
        if self._engine is None or self._device is None:
            raise InternalError("no device is open", rule="worker", fix="open one first")
        return self._engine, self._device


def _end_with_parent() -> None:
    """A kernel that hangs must not outlive whoever waits for it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _private_output() -> TextIO:
    """The former standard output, for replies alone: output of libraries goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return replies


def main() -> int:
    """Serve until standard input ends."""
    _end_with_parent()
    replies = _private_output()
    worker = Worker()
    for line in sys.stdin:
        reply = worker.answer(json.loads(line))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("lost"):
            return 1
    worker.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
