"""Flows that are made again in another session, and those whose outcome is not known; without a server."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

import tilewright as tw
from tilewright.errors import DeviceError
from tilewright.session.recovery import surviving
from tilewright.transport.rpc import Flow, Renew, Work

CORE: Any = SimpleNamespace(retries=3, closed=False, reconnects=True)
LAUNCH, LOOK = Work(lambda: None, effect=True), Work(lambda: None)


def lost() -> tw.UnavailableError:
    error = tw.UnavailableError("the session is over", field="", value="", rule="session_open", fix="")
    error.repeatable = True
    return error


def run(flow: Flow[Any], *replies: object) -> list[object]:
    """The steps of a flow whose steps come to ``replies``: values, and errors, which are raised."""
    first = next(flow)
    return [first, *(flow.throw(each) if isinstance(each, BaseException) else flow.send(each) for each in replies)]


def made(*steps: Work) -> Flow[Any]:
    """The steps one after the other, whatever a device says."""

    def flow() -> Flow[None]:
        for step in steps:
            with contextlib.suppress(DeviceError):
                yield step

    return surviving(CORE, flow, 5.0, 5.0)


def failed() -> DeviceError:
    return DeviceError("it failed while it ran", field="", value="", rule="device_fault", fix="")


def test_what_had_not_begun_is_made_again_in_a_new_session() -> None:
    steps = run(made(LOOK, LAUNCH), None, lost())
    assert isinstance(steps[-1], Renew)
    steps = run(made(LAUNCH), lost(), None)
    assert steps[0] is steps[2] is LAUNCH and isinstance(steps[1], Renew)


def test_what_took_effect_is_not_made_again() -> None:
    with pytest.raises(tw.UnknownOutcomeError):
        run(made(LAUNCH, LOOK), None, lost())


def test_what_failed_while_it_ran_is_not_made_again() -> None:
    with pytest.raises(tw.UnknownOutcomeError):
        run(made(LAUNCH, LOOK), failed(), lost())
