"""One id of a request from client to device: in its error, in the logs of both processes, in the audit and on spans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from rpc_harness import FAKE, REAL, Client, ServerProcess, eventually

import tilewright as tw
from tilewright.transport import frames
from tilewright.transport.frames import HEADER
from tilewright.transport.local import Connection
from tilewright_proto.inference import inference_pb2 as kserve
from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_server.protocol.request_ids import MAX_ID, Given, current, new_id, printable, serve

NOBODYS = 4711
"""A binding that nobody has."""


def lines(server: ServerProcess, **wanted: object) -> list[dict[str, Any]]:
    """Lines of the log that have these fields, once there is one."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        every = [json.loads(line) for line in server.log().splitlines()]
        found[:] = [line for line in every if all(line.get(name) == value for name, value in wanted.items())]
        return bool(found)

    assert eventually(look), (wanted, server.log())
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[ServerProcess]:
    """Every operation, and a CPU in a process of its own, as a GPU is."""
    folder = tmp_path_factory.mktemp("ids")
    settings = {"log_format": "json", "audit_log": folder / "audit.jsonl", "cpu_isolated": True}
    with ServerProcess(folder, REAL, device="cpu:0", cache_dir=kernel_cache, **settings) as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[tw.Client]:
    with tw.connect(server.addresses[0], launch="server") as made:
        yield made


def run_nonsense(client: tw.Client) -> tw.TilewrightError:
    with pytest.raises(tw.TilewrightError) as caught:
        client.run("nonsense", {"a": np.ones(2, np.float32)})
    return caught.value


def test_an_error_and_the_log_have_the_id_that_the_program_gives(server: ServerProcess, client: tw.Client) -> None:
    with tw.request_id("chat-1"):
        assert run_nonsense(client).request == "chat-1"
    (line,) = lines(server, request="chat-1")
    assert (line["method"], line["message"][:8]) == ("tilewright.v1.Dispatch/Plan", "refused:")


def test_without_one_the_client_gives_each_call_another(server: ServerProcess, client: tw.Client) -> None:
    first, second = run_nonsense(client).request, run_nonsense(client).request
    assert first and second and first != second
    for found in (first, second):
        assert len(lines(server, request=found)) == 1


@pytest.mark.parametrize("text", ["", " x", "x" * (MAX_ID + 1), "é", "a\nb"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught, tw.request_id(text):
        pass
    assert (caught.value.rule, caught.value.fix != "") == ("request_id", True)


def test_details_of_google_name_the_request(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.addresses[0]) as channel:
        run = channel.unary_unary("/tilewright.v1.Dispatch/Run")
        request = dp.RunRequest(operation="nonsense").SerializeToString()
        for metadata, given in (((("x-request-id", "other-2"),), "other-2"), ((), "")):
            with pytest.raises(grpc.RpcError) as caught:
                run(request, metadata=metadata, timeout=60)
            trailing = dict(caught.value.trailing_metadata())
            status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
            info = error_details_pb2.RequestInfo()
            (packed,) = (item for item in status.details if item.Is(info.DESCRIPTOR))
            packed.Unpack(info)
            assert info.request_id and given in ("", info.request_id)
            assert len(lines(server, request=info.request_id)) == 1


def test_an_asyncio_client_has_ids_too(server: ServerProcess) -> None:
    import asyncio

    async def run() -> tw.TilewrightError:
        async with tw.aio.connect(server.addresses[0], launch="server") as client:
            with tw.request_id("chat-aio"), pytest.raises(tw.TilewrightError) as caught:
                await client.run("nonsense", {"a": np.ones(2, np.float32)})
            return caught.value

    assert asyncio.run(run()).request == "chat-aio"
    assert lines(server, request="chat-aio")


def test_packets_of_the_local_socket_and_of_the_process_of_a_device_have_ids(server: ServerProcess) -> None:
    with Client(server.addresses[0]) as session:
        path, token = session.opened.local_socket, session.token
        places = {"": "tilewright.calls", "cpu:0": "tilewright_server.devices.worker.launches"}
        for device, logger in places.items():
            way = Connection(path, token, 60)
            try:
                if device:
                    way.request(frames.ATTACH, 0, device.encode())
                first, second, third = (launched(way, name) for name in ("", f"chat{device}", ""))
            finally:
                way.close()
            assert second == f"chat{device}"
            assert first and third and len({first, second, third}) == 3
            for found in (first, second, third):
                (line,) = lines(server, request=found)
                assert (line["logger"], line["rule"]) == (logger, "binding_id")
                assert line.get("source", "") == ("device process" if device else "")


def launched(way: Connection, name: str) -> str:
    """Id of a launch that is refused, under the program's id ``name``."""
    with tw.request_id(name) if name else tw.request_id("none-"):
        if not name:  # what has no id
            way.send(HEADER.pack(frames.REQUEST, 0, 0, 0, 0))
            way._told = "none-"
        with pytest.raises(tw.NotFoundError) as caught:
            sequence = way.next_sequence()
            way.ask(HEADER.pack(frames.LAUNCH, frames.TIME, 0, sequence, NOBODYS), sequence)
    return caught.value.request


def test_an_id_of_the_open_inference_protocol_is_one(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.addresses[0]) as channel:
        service = "/inference.GRPCInferenceService/"
        message = kserve.ModelInferRequest(model_name="tilewright.none", id="triton-3").SerializeToString()
        infer = channel.unary_unary(service + "ModelInfer")
        with pytest.raises(grpc.RpcError):
            infer(message, timeout=60)
        with pytest.raises(grpc.RpcError):
            infer(message, timeout=60, metadata=(("x-request-id", "mesh-4"),))
        stream = channel.stream_stream(service + "ModelStreamInfer")
        other = kserve.ModelInferRequest(model_name="tilewright.none", id="triton-5").SerializeToString()
        assert len(list(stream(iter((other,)), timeout=60))) == 1
    for found, method in (("triton-3", "ModelInfer"), ("mesh-4", "ModelInfer"), ("triton-5", "ModelStreamInfer")):
        (line,) = lines(server, request=found)
        assert (line["method"], line["rule"]) == (f"inference.GRPCInferenceService/{method}", "model_name")


def test_the_audit_has_it(server: ServerProcess) -> None:
    with tw.request_id("audited-1"), tw.connect(server.addresses[0]):
        pass
    audit = Path(server.log_path.with_name("audit.jsonl"))
    assert eventually(lambda: "audited-1" in audit.read_text())
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert all(entry["request"] for entry in entries)
    assert [entry["message"] for entry in entries if entry["request"] == "audited-1"] == [
        "tilewright.v1.Memory/OpenSession"
    ]


@pytest.mark.extended
def test_a_kernel_that_is_built_is_logged_with_the_request_that_wanted_it(tmp_path: Path) -> None:
    a = np.eye(16, dtype=np.float32)
    with ServerProcess(tmp_path, REAL, device="cpu:0", log_format="json") as server:
        with tw.connect(server.addresses[0], launch="server") as client, tw.request_id("first-use"):
            client.gemm(a, a)
        assert any(line["message"].startswith("built ") for line in lines(server, request="first-use"))


def test_an_older_server_is_told_of_no_ids(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, FAKE) as server, Client(server.addresses[0]) as session:
        way = Connection(session.opened.local_socket, session.token, 60)
        try:
            way._told = None  # as an older one answers HELLO
            with tw.request_id("chat-9"), pytest.raises(tw.NotFoundError) as caught:
                sequence = way.next_sequence()
                way.ask(HEADER.pack(frames.LAUNCH, frames.TIME, 0, sequence, NOBODYS), sequence)
            assert caught.value.request not in ("", "chat-9")
        finally:
            way.close()


def test_a_thread_says_whose_request_it_serves() -> None:
    assert current() == ""
    serve(Given("a"))
    assert current() == "a"
    serve(None)
    assert current() == ""
    assert new_id() != new_id()
    assert printable(b"\xff" * 500 + b"\n") == "\ufffd" * MAX_ID
    assert printable("a\x00b\n") == "ab"
