"""Flows that are made again in another session, those of unknown outcome, and sessions that are refused first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from device_server import DeviceServer

import tilewright as tw
from tilewright.errors import DeviceError
from tilewright.session.recovery import surviving
from tilewright.transport.rpc import Flow, Renew, Work
from tilewright_proto.v1 import error_pb2, memory_pb2

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


def unbound() -> tw.NotFoundError:
    return tw.NotFoundError("no such binding", field="binding", value="7", rule="binding_id", fix="bind again")


def test_a_launch_of_an_unknown_binding_is_made_again_once_unless_another_took_effect() -> None:
    assert run(made(LOOK, LAUNCH), None, unbound(), None) == [LOOK, LAUNCH, LOOK, LAUNCH]
    assert isinstance(run(made(LAUNCH), unbound(), lost())[-1], Renew)  # and goes on as if it were the first time
    with pytest.raises(tw.NotFoundError):
        run(made(LAUNCH), unbound(), unbound())
    with pytest.raises(tw.NotFoundError):
        run(made(LAUNCH, LAUNCH), None, unbound())


class Refusing(DeviceServer):
    """Refuses sessions as often as ``rules`` says, by these rules."""

    rules: list[str]
    asked = 0

    def OpenSession(self, request: Any, context: Any) -> Iterator[memory_pb2.SessionEvent]:
        self.asked += 1
        if not self.rules:
            yield from super().OpenSession(request, context)
            return
        error = error_pb2.ErrorDetail(code="resource_exhausted", message="not now", rule=self.rules.pop(0))
        error.retry_after_ms = 20
        context.set_trailing_metadata([("tilewright-error-bin", error.SerializeToString())])
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")


async def opened_by_asyncio(target: str) -> None:
    async with tw.aio.connect(target):
        pass


@pytest.mark.parametrize("blocking", [True, False])
def test_a_session_that_is_refused_for_the_moment_is_asked_for_again(tmp_path: Path, blocking: bool) -> None:
    with Refusing.running(tmp_path, local=False) as (server, target):
        assert isinstance(server, Refusing)
        for rules, asked in ((["request_time"] * 2, 3), (["quota"], 1), (["request_time"] * 9, 6)):
            server.rules, server.asked = list(rules), 0
            refused = pytest.raises(tw.ResourceExhaustedError, match="not now")
            with contextlib.nullcontext() if asked == len(rules) + 1 else refused:
                if blocking:
                    tw.connect(target, start=False).close()
                else:
                    asyncio.run(opened_by_asyncio(target))
            assert server.asked == asked
