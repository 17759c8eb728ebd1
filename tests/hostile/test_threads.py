"""Threads of the server cannot be used up: not by the system's limit, by silence, by long work or by long waits."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hostile_servers import (
    GEMM,
    RUN,
    WAIT_S,
    bystander_lives,
    channel,
    healthy,
    limited_group,
    silent_calls,
    start_with_few_threads,
    threads_of,
)
from rpc_harness import FAKE, Client, ServerProcess, detail_of, eventually, floats, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

RETURNED = tp.Location(return_inline=tp.ReturnInline())


def idle_streams(client: Client, count: int, hold: threading.Event) -> list[Any]:
    def requests() -> Iterator[dp.ExecuteRequest]:
        hold.wait(60)
        yield from ()

    return [client.dispatch.ExecuteStream(requests()) for _ in range(count)]


@pytest.mark.extended
def test_a_refused_thread_ends_nothing(tmp_path: Path) -> None:
    with start_with_few_threads(tmp_path, 4) as server, contextlib.ExitStack() as clients:
        address = server.addresses[0]
        hold = threading.Event()
        attackers = [clients.enter_context(Client(address)) for _ in range(8)]
        streams = [stream for client in attackers for stream in idle_streams(client, 10, hold)]
        calls = []
        for client in attackers:
            request = client.execution(client.plan(4, seconds=0.1), inline(bytes(16)), RETURNED)
            calls += [client.dispatch.Execute.future(request) for _ in range(6)]
        assert eventually(lambda: "refuses a thread" in server.log())
        bystander_lives(address)
        assert all(call.result(WAIT_S).results for call in calls)
        hold.set()
        assert [list(stream) for stream in streams] == [[]] * 80
        bystander_lives(address)
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()


@pytest.mark.extended
def test_a_container_of_sixty_processes_and_eighty_idle_streams(tmp_path: Path) -> None:
    """It had ended gRPC's only thread that takes calls, for ever: now new calls are taken, and streams still go on."""
    with limited_group("pids", "pids.max", 60) as group, contextlib.ExitStack() as clients:
        server = clients.enter_context(ServerProcess(tmp_path, [*group, *FAKE]))
        address = server.addresses[0]
        assert "workers is" in server.log(), "the server sizes itself by the limit"
        hold = threading.Event()
        attackers = [clients.enter_context(Client(address)) for _ in range(8)]
        streams = [stream for client in attackers for stream in idle_streams(client, 10, hold)]
        calls = []
        for client in attackers:
            request = client.execution(client.plan(4, seconds=0.05), inline(bytes(16)), RETURNED)
            calls += [client.dispatch.Execute.future(request) for _ in range(10)]
        for _ in range(3):
            bystander_lives(address)
        done = [call.exception(WAIT_S) for call in calls]
        assert {detail_of(error).rule for error in done if error is not None} <= {"quota"}
        hold.set()
        assert [list(stream) for stream in streams] == [[]] * 80
        bystander_lives(address)
        assert server.stop() == 0, server.log()


@pytest.mark.extended
def test_calls_without_a_request_hold_no_thread(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, workers=4) as server, channel(server.addresses[0]) as way:
        before = threads_of(server.pid)
        hold = threading.Event()
        calls = silent_calls(way, RUN, 300, hold)
        bystander_lives(server.addresses[0])
        assert threads_of(server.pid) <= before + 4
        hold.set()
        # Some gave way to others, the rest is told that a request is missing.
        assert {detail_of(call.exception(WAIT_S)).rule for call in calls} <= {"request_time", "wire_format"}


def test_idle_streams_hold_no_threads(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, workers=4) as server, Client(server.addresses[0]) as client:
        before = threads_of(server.pid)
        hold = threading.Event()
        streams = idle_streams(client, 100, hold)
        bystander_lives(server.addresses[0])
        assert threads_of(server.pid) <= before + 4
        hold.set()
        assert [list(stream) for stream in streams] == [[]] * 100


@pytest.mark.extended
def test_what_goes_beyond_the_line_is_refused_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, workers=4, calls_waiting=16) as server, Client(server.addresses[0]) as client:
        plan = client.plan(4, seconds=0.2)
        request = client.execution(plan, inline(bytes(16)), RETURNED)
        calls = [client.dispatch.Execute.future(request) for _ in range(60)]
        errors = [error for call in calls if (error := call.exception(WAIT_S)) is not None]
        # At most half of the threads, and half of the line, are one client's.
        assert 60 - len(errors) <= 2 + 8 + 2
        assert len(errors) < 60
        for error in errors:
            detail = detail_of(error)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (detail.rule, detail.field, detail.value) == ("quota", "work_calls_waiting", "16")
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == str(detail.retry_after_ms)
        bystander_lives(server.addresses[0])


def gemm(kind: Any, client: Client, size: int, **more: Any) -> Any:
    inputs = [tp.Operand(name=name, spec=floats(size, size)) for name in "ab"]
    return kind(session=client.token, operation="gemm", inputs=inputs, **more)


def product(client: Client, size: int = 16) -> Any:
    request = gemm(dp.RunRequest, client, size)
    ones = np.ones((size, size), np.float32).tobytes()
    for item in request.inputs:
        item.location.inline = ones
    reply = client.dispatch.Run(request, timeout=WAIT_S)
    return np.frombuffer(reply.outputs[0].inline, np.float32)


@pytest.mark.slow
def test_long_executions_of_one_client_leave_the_others_theirs(tmp_path: Path, kernel_cache: Path) -> None:
    with ServerProcess(tmp_path, GEMM, cache_dir=kernel_cache) as server:
        address = server.addresses[0]
        with Client(address) as attacker, Client(address) as victim:
            assert product(victim)[0] == 16
            plan = attacker.dispatch.Plan(gemm(dp.PlanRequest, attacker, 64))
            ones = np.ones((64, 64), np.float32).tobytes()
            buffers = [
                attacker.memory.CreateBuffer(mp.CreateBufferRequest(session=attacker.token, bytes=len(ones))).buffer
                for _ in range(3)
            ]
            places = [tp.Location(buffer=tp.BufferSlice(buffer=buffer)) for buffer in buffers]
            execution = dp.Execution(plan=plan.plan, locations=places, repeat=1_000_000)
            request = dp.ExecuteRequest(session=attacker.token, executions=[execution])
            calls = [attacker.dispatch.Execute.future(request) for _ in range(70)]
            attacker.memory.Status(mp.StatusRequest(session=attacker.token), timeout=WAIT_S)  # they are there by now
            bystander_lives(address, statistics=True)
            assert product(victim)[0] == 16
            assert not any(call.done() for call in calls)
            for call in calls:
                call.cancel()
            assert healthy(address)


def test_health_has_threads_of_its_own(tmp_path: Path) -> None:
    """A process whose calls have all the threads that it may have is answered about health beside them."""
    with ServerProcess(tmp_path, workers=4) as server, contextlib.ExitStack() as clients:
        address = server.addresses[0]
        callers = [clients.enter_context(Client(address)) for _ in range(4)]
        plans = [client.plan(4, seconds=4.0) for client in callers]
        calls = []
        for client, plan in zip(callers, plans, strict=True):
            request = client.execution(plan, inline(bytes(16)), RETURNED)
            calls.append(client.dispatch.Execute.future(request))
            client.status()  # the call before is there by now
        assert healthy(address)
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()


COMPILER = """#!/bin/sh
case "$*" in *-shared*) while [ -e {gate} ]; do sleep 0.05; done;; esac
exec {compiler} "$@"
"""


@pytest.mark.slow
@pytest.mark.extended
def test_callers_that_wait_for_a_kernel_leave_the_others_theirs(tmp_path: Path) -> None:
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no C++ compiler: install g++")
    gate, compiler = tmp_path / "gate", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(gate=gate, compiler=real))
    compiler.chmod(0o755)
    with ServerProcess(tmp_path, GEMM, compiler=compiler) as server:
        address = server.addresses[0]
        with Client(address) as attacker, Client(address) as victim:
            assert product(victim)[0] == 16
            gate.touch()
            cold = gemm(dp.RunRequest, attacker, 16)
            for item in cold.inputs:
                item.location.inline = bytes(16 * 16 * 4)
            cold.attributes["unary"].text = "Relu"
            calls = [attacker.dispatch.Run.future(cold) for _ in range(80)]
            builds = [attacker.kernels.Build(kp.BuildRequest(filter=kp.KernelFilter(operation="gemm"))) for _ in "123"]
            bystander_lives(address, statistics=True)
            assert product(victim)[0] == 16
            assert not any(call.done() for call in calls)
            for build in builds:
                build.cancel()
            gate.unlink()
            assert all(call.result(60).outputs for call in calls)


def test_idle_streams_of_reflection_leave_it_to_others(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, channel(server.addresses[0]) as way, channel(server.addresses[0]) as other:
        hold = threading.Event()

        def requests(first: bool) -> Iterator[Any]:
            if first:
                yield reflection_pb2.ServerReflectionRequest(list_services="")
            hold.wait(60)

        before = threads_of(server.pid)
        stub = reflection_pb2_grpc.ServerReflectionStub(way)
        streams = [stub.ServerReflectionInfo(requests(False), timeout=60) for _ in range(50)]
        another = reflection_pb2_grpc.ServerReflectionStub(other)
        for _ in range(3):
            answer = next(another.ServerReflectionInfo(requests(True), timeout=WAIT_S))
            assert "tilewright.v1.Dispatch" in [item.name for item in answer.list_services_response.service]
        assert threads_of(server.pid) <= before + 6
        hold.set()
        for stream in streams:
            assert list(stream) == []
