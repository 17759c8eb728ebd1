"""Clients that are connected to the process of a device: launches, bindings and errors."""

from __future__ import annotations

import numpy as np
import pytest
from worker_harness import (
    Client,
    N,
    bind_add,
    eventually,
)

from tilewright_kit.contract.plan import I64, WORKSPACE, Geometry, Pointer, Struct, pack
from tilewright_kit.types.errors import (
    NotFoundError,
)
from tilewright_server.devices.contract import (
    REPLY,
    TIME,
    WAIT,
    ProgramStage,
)
from tilewright_server.protocol.frames import HEADER, REPLY_KIND, Kind


@pytest.mark.extended
def test_launches_of_a_client_run_in_order_and_are_answered_when_asked(client: Client) -> None:
    out = bind_add(client)
    client.send((0, 0, 1, 7), (0, 0, 2, 7), (REPLY, 3, 3, 7))
    assert client.receive()[0][:4] == (REPLY_KIND | Kind.LAUNCH, 0, 3, 3)
    assert (client.bench.get(out) == 3).all()
    client.send((TIME, 0, 4, 7))
    header, payload = client.receive()
    assert header[:4] == (REPLY_KIND | Kind.LAUNCH, 0, 0, 4)
    assert 0 < header[4] < 10**9
    assert payload == b""


def test_full_packets_of_launches(client: Client) -> None:
    out = bind_add(client)
    for _ in range(20):
        client.send(*[(0, 0, index, 7) for index in range(63)], (REPLY, 0, 63, 7))
    for _ in range(20):
        assert client.receive()[0][3] == 63
    assert (client.bench.get(out) == 1280).all()


def test_launch_that_fails_is_always_answered_and_the_next_goes_on(client: Client) -> None:
    out = bind_add(client)
    client.send((0, 0, 1, 7), (0, 0, 2, 8), (WAIT, 5, 3, 7), (0, 0, 4, 7), (REPLY, 0, 5, 7))
    unknown, event = client.error(), client.error()
    assert (unknown.code, unknown.rule) == ("not_found", "binding_id")
    assert event.rule == "event_slot"
    assert client.receive()[0][3] == 5
    assert (client.bench.get(out) == 3).all()


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\x03" * 15,
        HEADER.pack(Kind.LAUNCH, 0, 0, 0, 7) + b"y",
        HEADER.pack(Kind.CALL, 0, 0, 0, 1) + b"payload",
        HEADER.pack(Kind.LAUNCH, 0, 0, 0, 7) * 65,
        HEADER.pack(Kind.LAUNCH, 0, 0, 0, 99) * 2000,
        HEADER.pack(255, 0, 0, 0, 7),
    ],
)
def test_packets_that_mean_nothing_are_refused(client: Client, data: bytes) -> None:
    out = bind_add(client)
    client.socket.send(data)
    assert client.error().rule == "packet_format"
    client.send((REPLY, 0, 1, 7))
    assert client.receive()[0][3] == 1
    assert (client.bench.get(out) == 1).all()


def test_device_without_events_says_so(client: Client) -> None:
    client.socket.send(HEADER.pack(Kind.OPEN_EVENT, 0, 2, 9, 0) + bytes(64))
    assert client.error().rule == "event_support"


def test_binding_gets_workspace_of_its_connection(client: Client) -> None:
    bench = client.bench
    x, out = bench.put(np.ones(N, np.float32)), bench.put(np.zeros(N, np.float32))
    add = bench.device.load(bench._binary).function("add")

    def bind(binding: int, size: int) -> None:
        first = Struct((Pointer("x"), Pointer("x"), Pointer(WORKSPACE, size - 4 * N), I64(N)))
        second = Struct((Pointer(WORKSPACE, size - 4 * N), Pointer("x"), Pointer("out"), I64(N)))
        stages = [ProgramStage(add, pack(args), Geometry()) for args in (first, second)]
        bench.device.bind(1, binding, bench.device.program(stages, ("x", "out")), [x.address, out.address], size)

    def check(binding: int) -> None:
        client.send((REPLY, 0, 0, binding))
        client.receive()
        assert (bench.get(out) == 3).all()
        bench.device.write(out, 0, memoryview(np.zeros(N, np.float32)))

    bind(1, 4 * N)
    bind(2, 40 * N)
    for binding in (1, 2, 1):
        check(binding)
    bench.device.unbind(1, 2)
    check(1)
    bench.device.unbind(1, 1)  # and with it the workspace, which the next brings anew
    bind(3, 4 * N)
    check(3)


def test_binding_that_was_taken_back_is_unknown(client: Client) -> None:
    bind_add(client)
    client.bench.device.unbind(1, 7)
    client.bench.device.unbind(1, 7)
    client.send((REPLY, 0, 0, 7))
    assert client.error().rule == "binding_id"


def test_clients_do_not_see_the_bindings_of_others(client: Client) -> None:
    bind_add(client, 7)
    other = Client(client.bench, 2)
    other.send((REPLY, 0, 0, 7))
    assert other.error().rule == "binding_id"
    other.socket.close()


def test_client_that_goes_ends_its_connection(client: Client) -> None:
    bind_add(client)
    client.socket.close()
    assert client.ended.wait(10)
    with pytest.raises(NotFoundError):
        client.bench.device.bind(1, 8, client.bench.add(), [client.bench.device.allocate(4).address] * 3, 0)
    client.bench.device.unbind(1, 7)
    client.bench.device.detach(1)


def test_server_may_end_a_connection(client: Client) -> None:
    client.bench.device.detach(1)
    assert client.ended.wait(10)
    assert client.socket.recv(100) == b""


def test_kernel_that_faults_ends_the_connections_of_its_worker_and_is_the_suspect(client: Client) -> None:
    bench, program = client.bench, client.bench.crash()
    idle = Client(bench, 2)
    bind_add(idle, 3)
    idle.send((REPLY, 0, 0, 3))
    idle.receive()
    bench.device.bind(1, 7, program, [], 0)
    client.send((REPLY, 0, 0, 7))
    assert client.socket.recv(100) == b""
    assert idle.socket.recv(100) == b""
    assert client.ended.wait(10)
    assert idle.ended.wait(10)
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == (program,)
    again = Client(bench, 3)
    out = bind_add(again)
    again.send((REPLY, 0, 0, 7))
    again.receive()
    assert (bench.get(out) == 1).all()
    again.socket.close()
    idle.socket.close()
