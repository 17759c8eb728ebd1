"""Prepared plans, alone, in batches and on streams."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fake_engine import BEGUN
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, eventually, in_region, inline, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import tensor_pb2 as tp

TEXT = bytes(range(64))
RETURN = tp.Location(return_inline=tp.ReturnInline())


@pytest.mark.extended
def test_a_plan_runs_again_and_again(client: Client, file: MemoryFile) -> None:
    region = client.register(file).region
    request = client.execution(client.plan(), in_region(region), in_region(region, 64))
    for value in range(5):
        file.bytes[:64] = bytes([value]) * 64
        reply = client.dispatch.Execute(request)
        assert not reply.results[0].HasField("error")
        assert not reply.results[0].bytes_copied
        assert file.bytes[64:128] == bytes([value]) * 64


def test_executions_of_a_request_run_in_order(client: Client, file: MemoryFile) -> None:
    region = client.register(file).region
    plan = client.plan()
    file.bytes[:64] = TEXT
    request = client.execution(plan)
    del request.executions[:]
    for step in range(20):
        locations = [in_region(region, 64 * step), in_region(region, 64 * (step + 1))]
        request.executions.append(dp.Execution(plan=plan, locations=locations))
    client.dispatch.Execute(request)
    assert file.bytes[64 * 20 : 64 * 21] == TEXT


def test_executions_run_in_order_through_copies_too(client: Client) -> None:
    file = MemoryFile(4096, sealed=False)
    region = client.register(file).region
    plan = client.plan()
    file.bytes[:64] = TEXT
    chain = [
        dp.Execution(plan=plan, locations=[in_region(region, 64 * step), in_region(region, 64 * (step + 1))])
        for step in range(10)
    ]
    reply = client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=chain))
    assert file.bytes[640:704] == TEXT
    assert [result.bytes_copied for result in reply.results] == [128] * 10
    file.close()


def test_a_failed_execution_does_not_stop_the_others(client: Client, file: MemoryFile) -> None:
    region = client.register(file).region
    plan = client.plan()
    good = dp.Execution(plan=plan, locations=[inline(TEXT), RETURN])
    bad = [
        dp.Execution(plan=plan ^ 1, locations=good.locations),
        dp.Execution(plan=plan, locations=[inline(TEXT)]),
        dp.Execution(plan=plan, locations=[inline(b"short"), RETURN]),
        dp.Execution(plan=plan, locations=[RETURN, RETURN]),
        dp.Execution(plan=plan, locations=[inline(TEXT), inline(TEXT)]),
        dp.Execution(plan=plan, locations=[in_region(region ^ 1), RETURN]),
        dp.Execution(plan=plan, locations=[in_region(region, 2**40), RETURN]),
        dp.Execution(plan=plan, locations=[tp.Location(), RETURN]),
        dp.Execution(plan=plan, locations=good.locations, repeat=2**32 - 1),
    ]
    rules = ["plan_id", "operand_count", "inline_size", "operand_location", "operand_location", "region_id"]
    rules += ["location_bounds", "operand_location", "repeat_limit"]
    mixed = [part for item in bad for part in (good, item)]
    reply = client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=mixed))
    assert [result.error.rule for result in reply.results[1::2]] == rules
    assert all(result.outputs[0].inline == TEXT for result in reply.results[::2])


def test_a_released_plan_is_gone(client: Client) -> None:
    plan = client.plan()
    request = client.execution(plan, inline(TEXT), RETURN)
    client.dispatch.Execute(request)
    client.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=client.token, plan=plan))
    assert client.dispatch.Execute(request).results[0].error.rule == "plan_id"
    with refused("not_found", "plan_id"):
        client.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=client.token, plan=plan))


def test_a_plan_is_invisible_to_other_sessions(client: Client, connect: Callable[[], Client]) -> None:
    plan = client.plan()
    other = connect()
    assert other.dispatch.Execute(other.execution(plan, inline(TEXT), RETURN)).results[0].error.rule == "plan_id"
    with refused("not_found", "plan_id"):
        other.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=other.token, plan=plan))


def test_a_remembered_request_does_not_outlive_its_session(connect: Callable[[], Client]) -> None:
    first, second = connect(), connect()
    file = MemoryFile(4096)
    region = first.register(file).region
    request = first.execution(first.plan(), in_region(region), in_region(region, 64))
    first.dispatch.Execute(request)
    first.close()
    assert eventually(lambda: _refuses(second, request))
    with refused("not_found", "session_token"):
        second.dispatch.Execute(request)
    file.close()


def _refuses(client: Client, request: dp.ExecuteRequest) -> bool:
    try:
        client.dispatch.Execute(request)
    except grpc.RpcError:
        return True
    return False


def test_regions_that_come_and_go_under_load_are_never_used_stale(client: Client, server: ServerProcess) -> None:
    plan = client.plan()
    current: list[int] = [0]
    seen = set()
    begun = time.monotonic()
    # A second long, and on a busy machine until both ways have been seen.
    going = lambda: time.monotonic() < begun + (1 if {"", "region_id"} <= seen else 60)  # noqa: E731

    def churn() -> None:
        while going():
            file = MemoryFile(4096)
            current[0] = client.register(file).region
            time.sleep(0.002)
            client.unregister(current[0])
            file.close()

    def run() -> None:
        while going():
            region = current[0]
            request = client.execution(plan, in_region(region), in_region(region, 64))
            seen.add(client.dispatch.Execute(request).results[0].error.rule)

    mapped = server.regions()[0]
    threads = [threading.Thread(target=target) for target in (churn, run, run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A mapping that ends while its pages are looked for has none.
    assert {"", "region_id"} <= seen <= {"", "region_id", "region_populated"}
    assert server.regions()[0] == mapped


# Streams


def test_a_stream_answers_in_order_with_many_in_flight(client: Client) -> None:
    plan = client.plan(count=1)
    numbers = [index.to_bytes(4, "little") for index in range(300)]
    requests = (client.execution(plan, inline(number), RETURN) for number in numbers)
    replies = list(client.dispatch.ExecuteStream(requests))
    assert [reply.results[0].outputs[0].inline for reply in replies] == numbers


def test_failures_do_not_end_a_stream(client: Client, file: MemoryFile) -> None:
    plan = client.plan()
    good = client.execution(plan, inline(TEXT), RETURN)
    bad = client.execution(plan, inline(b""), RETURN)
    lost = dp.ExecuteRequest(session=b"0" * 16, executions=[good.executions[0]] * 3)
    replies = list(client.dispatch.ExecuteStream(iter([good, bad, lost, good])))
    assert [result.error.rule for reply in replies for result in reply.results] == [
        "",
        "inline_size",
        "session_token",
        "",
    ]


@contextlib.contextmanager
def occupied(client: Client, file: MemoryFile) -> Iterator[int]:
    """While a launch holds the device: the file as a region, of which it takes the last bytes."""
    region, at = client.register(file).region, file.nbytes - 128
    held = client.execution(client.plan(held=1), in_region(region, at), in_region(region, at + 64))
    running = client.dispatch.Execute.future(held)
    assert eventually(lambda: file.bytes[at + 64] == BEGUN)
    yield region
    file.bytes[at + 64] = 0
    assert not running.result(60).results[0].HasField("error")


def test_a_stream_gives_up_what_is_late(client: Client, file: MemoryFile) -> None:
    late = client.execution(client.plan(), inline(TEXT), RETURN, timeout_ms=20)
    with occupied(client, file):
        replies = list(client.dispatch.ExecuteStream(iter([late])))
    assert replies[0].results[0].error.code == "deadline_exceeded"


def test_a_stream_that_is_not_read_holds_back_its_requests(client: Client, server: ServerProcess) -> None:
    plan = client.plan(count=1 << 18)
    request = client.execution(plan, inline(bytes(1 << 20)), RETURN)
    sent = []

    def requests() -> Iterator[dp.ExecuteRequest]:
        for index in range(200):
            sent.append(index)
            yield request

    before = server.rss_mib()
    stream = client.dispatch.ExecuteStream(requests())
    next(stream)
    time.sleep(0.5)
    assert len(sent) < 100, "the server reads on while its replies wait"
    assert server.rss_mib() < before + 100
    stream.cancel()


def test_one_stream_too_many_is_told_so(client: Client) -> None:
    hold = threading.Event()
    plan = client.plan()
    request = client.execution(plan, inline(TEXT), RETURN)

    def requests() -> Iterator[dp.ExecuteRequest]:
        yield request
        hold.wait(10)

    streams = [client.dispatch.ExecuteStream(requests()) for _ in range(8)]
    for stream in streams:
        next(stream)
    with refused("resource_exhausted", "quota"):
        list(client.dispatch.ExecuteStream(iter([request])))
    client.dispatch.Execute(request)  # others are not held up
    hold.set()
    for stream in streams:
        assert not list(stream)


# Queue and deadlines


@pytest.mark.extended
def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, queue_limit=2) as server, Client(server.addresses[0]) as client:
        request = client.execution(client.plan(seconds=0.2), inline(TEXT), RETURN)
        running = [client.dispatch.Execute.future(request) for _ in range(6)]
        errors = [call.exception() for call in running]
        refusals = [error for error in errors if error is not None]
        assert 1 <= len(refusals) <= 5
        for error in refusals:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
            assert detail_of(error).rule == "queue_full"
            assert detail_of(error).retry_after_ms > 0


def test_a_passed_deadline_is_not_launched(client: Client, file: MemoryFile) -> None:
    with occupied(client, file) as region:
        file.bytes[:64] = TEXT
        late = client.execution(client.plan(), in_region(region), in_region(region, 64))
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            client.dispatch.Execute(late, timeout=0.05)
    time.sleep(0.1)
    assert file.bytes[64:128] == bytes(64)


def test_a_cancelled_call_is_not_launched(client: Client, file: MemoryFile) -> None:
    with occupied(client, file) as region:
        file.bytes[:64] = TEXT
        call = client.execution(client.plan(), in_region(region), in_region(region, 64))
        running = client.status().regions[0].in_use
        waiting = client.dispatch.Execute.future(call)
        assert eventually(lambda: client.status().regions[0].in_use > running)
        waiting.cancel()
        client.status()  # over the same connection: the server has read by now that the call was cancelled
        time.sleep(0.1)
    time.sleep(0.1)
    assert file.bytes[64:128] == bytes(64)


def test_inline_operands_have_a_limit(client: Client) -> None:
    limit = client.opened.inline_limit
    with refused("invalid_argument", "inline_limit"):
        client.copy(inline(bytes(limit + 4)), count=limit // 4 + 1)
    plan = client.plan(count=limit // 4)
    file = MemoryFile(limit)
    region = client.register(file).region
    many = client.execution(plan, in_region(region), RETURN)
    for _ in range(7):
        many.executions.append(many.executions[0])
    results = client.dispatch.Execute(many).results
    assert {result.error.rule for result in results} == {"", "reply_limit"}
    file.close()


def test_empty_tensors_need_no_memory(client: Client) -> None:
    reply = client.copy(tp.Location(), count=0)
    assert reply.outputs[0].inline == b""
    assert list(reply.outputs[0].spec.shape) == [0]
