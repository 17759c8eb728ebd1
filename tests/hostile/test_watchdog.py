"""A server that answers nobody ends, with a reason; one that is stopped, slow or busy goes on."""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hostile_servers import RUN, WAIT_S, bystander_lives, channel, silent_calls
from rpc_harness import Client, ServerProcess, inline

from tilewright_proto.v1 import tensor_pb2 as tp
from tilewright_server.endpoints.rpc.watchdog import EXIT_STATUS, Watchdog

STUCK = [sys.executable, str(Path(__file__).with_name("stuck_server.py"))]


def test_a_server_that_answers_nobody_ends_with_a_reason(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, STUCK, watchdog_s=2) as server:
        bystander_lives(server.addresses[0])
        server.signal(signal.SIGUSR1)
        assert server.wait(30) == EXIT_STATUS
        assert "no answer to the health check" in server.log()
        assert "Thread 0x" in server.log()  # where each thread was


@pytest.mark.extended
def test_a_server_that_was_stopped_goes_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, watchdog_s=1) as server:
        bystander_lives(server.addresses[0])
        for _ in range(2):
            server.signal(signal.SIGSTOP)
            time.sleep(1.6)  # more than it may be silent
            server.signal(signal.SIGCONT)
            bystander_lives(server.addresses[0])
        assert server.stop() == 0, server.log()


@pytest.mark.extended
def test_a_server_under_load_goes_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, watchdog_s=4, workers=4) as server, Client(server.addresses[0]) as client:
        hold = threading.Event()
        with channel(server.addresses[0]) as way:
            silent = silent_calls(way, RUN, 100, hold)
            request = client.execution(
                client.plan(4, seconds=0.05), inline(bytes(16)), tp.Location(return_inline=tp.ReturnInline())
            )
            asked = silent_calls(way, "/grpc.health.v1.Health/Check", 40, hold)
            for _ in range(4):  # of a second and a half each
                calls = [client.dispatch.Execute.future(request) for _ in range(30)]
                assert all(call.result(WAIT_S) for call in calls)
            hold.set()
            for call in (*silent, *asked):
                call.cancel()
        assert server.stop() == 0, server.log()


def test_a_watchdog_that_is_stopped_ends_nothing(tmp_path: Path) -> None:
    ended: list[str] = []
    watchdog = Watchdog(f"unix:{tmp_path}/nobody", 0.2, ended.append)
    watchdog.start()
    watchdog.stop()
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive() and ended == []


def test_a_watchdog_says_what_it_heard(tmp_path: Path) -> None:
    ended: list[str] = []
    heard = threading.Event()
    watchdog = Watchdog(f"unix:{tmp_path}/nobody", 0.4, lambda reason: (ended.append(reason), heard.set()))  # type: ignore[func-returns-value]
    watchdog.start()
    assert heard.wait(20)
    assert "nobody" in ended[0] and "UNAVAILABLE" in ended[0]


class Slow(health_pb2_grpc.HealthServicer):
    """Answers to the check of its health after a second and a half."""

    def __init__(self) -> None:
        self.answers = 0

    def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> health_pb2.HealthCheckResponse:
        time.sleep(1.5)
        self.answers += 1
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.extended
def test_a_server_that_answers_slowly_goes_on(tmp_path: Path) -> None:
    ended: list[str] = []
    server, slow = grpc.server(ThreadPoolExecutor(8)), Slow()
    health_pb2_grpc.add_HealthServicer_to_server(slow, server)
    server.add_insecure_port(f"unix:{tmp_path}/slow")
    server.start()
    watchdog = Watchdog(f"unix:{tmp_path}/slow", 6, ended.append)
    watchdog.start()
    deadline = time.monotonic() + WAIT_S
    while slow.answers < 4 and not ended and time.monotonic() < deadline:
        time.sleep(0.1)
    watchdog.stop()
    server.stop(None)
    assert slow.answers >= 4 and ended == []


@pytest.mark.extended
def test_a_watchdog_is_answered_by_a_server_that_drains(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, watchdog_s=1) as server, Client(server.addresses[0]) as client:
        plan = client.plan(4, seconds=2.5)
        request = client.execution(plan, inline(bytes(16)), tp.Location(return_inline=tp.ReturnInline()))
        call = client.dispatch.Execute.future(request)
        with pytest.raises(grpc.FutureTimeoutError):
            call.result(0.3)
        server.signal(signal.SIGTERM)
        assert call.result(WAIT_S).results
        assert server.wait() == 0
