"""From start to stop: quick, small, and never in a hurry with work in flight."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import BEGUN
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from rpc_harness import REAL, Client, MemoryFile, ServerProcess, detail_of, eventually, in_region, inline

from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import tensor_pb2 as tp

pytestmark = pytest.mark.slow

TEXT = bytes(range(64))
RETURN = tp.Location(return_inline=tp.ReturnInline())
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(client: Client, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status)


@pytest.mark.extended
def test_it_starts_and_idles_small(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, REAL) as server:
        assert server.ready.startswith("ready: "), server.log()
        time.sleep(0.5)
        assert server.rss_mib() < 150
        with Client(server.addresses[0]) as client:
            assert health(client) == SERVING
            plugins = client.kernels.Statistics(kp.StatisticsRequest()).plugins
            assert all(plugin.loaded for plugin in plugins), plugins


@pytest.mark.parametrize("device", ["cpu:7", "cuda:63", "hip:63", "nonsense"])
@pytest.mark.extended
def test_it_does_not_start_without_the_device_that_it_is_to_have(tmp_path: Path, device: str) -> None:
    server = ServerProcess(tmp_path, REAL, device=device)
    assert (server.ready, server.wait()) == ("", 1)
    assert not server.socket.exists()
    assert "cannot start: this server has no such device" in server.log()
    assert f"[device={device}] Fix: " in server.log()
    assert "cpu:0" in server.log(), "what there is"


def test_health_has_a_name_for_the_whole_and_for_each_operation(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        assert health(client) == SERVING
        assert health(client, "tilewright.copy") == SERVING
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health(client, "tilewright.nothing")


def test_reflection_of_both_versions_names_the_services_and_gives_their_files(tmp_path: Path) -> None:
    ask = reflection_pb2.ServerReflectionRequest  # grpcio's package has v1alpha alone; v1 has the same messages
    services = {f"tilewright.v1.{name}" for name in ("Dispatch", "Memory", "Kernels")}
    dispatch = "tilewright.v1.Dispatch"
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        for version in ("v1", "v1alpha"):
            way = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            reply = reflection_pb2.ServerReflectionResponse.FromString
            info = client.channel.stream_stream(way, ask.SerializeToString, reply)
            requests = [ask(list_services=""), ask(file_containing_symbol=dispatch), ask(file_by_filename="none.proto")]
            listed, found, missing = info(iter(requests), timeout=60)
            names = [service.name for service in listed.list_services_response.service]
            assert services | {"inference.GRPCInferenceService"} <= set(names)
            described = list(info(iter([ask(file_containing_symbol=name) for name in names]), timeout=60))
            assert all(item.file_descriptor_response.file_descriptor_proto for item in described), (names, described)
            (shared,) = info(iter([ask(file_containing_symbol="tilewright.v1.ErrorDetail")]), timeout=60)
            assert shared.HasField("file_descriptor_response")
            files = map(FileDescriptorProto.FromString, found.file_descriptor_response.file_descriptor_proto)
            by_name = {file.name: file for file in files}
            (file,) = (file for file in by_name.values() if file.package == "tilewright.v1" and file.service)
            assert [service.name for service in file.service] == ["Dispatch"]
            assert "Run" in {method.name for method in file.service[0].method}
            (again,) = info(iter([ask(file_by_filename=file.name)]), timeout=60)
            assert FileDescriptorProto.FromString(again.file_descriptor_response.file_descriptor_proto[0]) == file
            assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.extended
def test_an_idle_lease_does_not_delay_the_end(tmp_path: Path, number: int) -> None:
    with ServerProcess(tmp_path, grace_s=120) as server, Client(server.addresses[0]) as client:
        file = MemoryFile(4096)
        client.register(file)
        server.signal(number)
        events = list(client.lease)
        assert server.wait() == 0, "long before the grace is over"
        assert [event.WhichOneof("event") for event in events] == ["closing"]
        assert not server.socket.exists()
        file.close()


@pytest.mark.extended
def test_open_streams_and_watchers_do_not_delay_the_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, grace_s=120) as server, Client(server.addresses[0]) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        request = client.execution(client.plan(), inline(TEXT), RETURN)
        hold = threading.Event()

        def requests():  # type: ignore[no-untyped-def]
            yield request
            hold.wait(10)

        stream = client.dispatch.ExecuteStream(requests())
        next(stream)
        server.signal()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert detail_of(caught.value).code == "unavailable"
        assert next(watch).status == NOT_SERVING
        hold.set()
        assert server.wait() == 0


def test_work_in_flight_is_finished_and_new_work_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        file = MemoryFile(4096)
        region = client.register(file).region
        file.bytes[:64] = TEXT
        slow = client.execution(client.plan(seconds=0.5), in_region(region), in_region(region, 64))
        running = client.dispatch.Execute.future(slow)
        assert eventually(lambda: client.status().regions[0].in_use > 0)
        server.signal()
        time.sleep(0.1)
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            Client(server.addresses[0], session=False).dispatch.Execute(slow, timeout=2)
        assert not running.result().results[0].HasField("error")
        assert file.bytes[64:128] == TEXT
        assert server.wait() == 0
        file.close()


@contextlib.contextmanager
def working(server: ServerProcess) -> Iterator[Any]:
    """A call whose launch has begun and goes on for longer than anybody waits."""
    with Client(server.addresses[0]) as client, contextlib.closing(MemoryFile(4096)) as file:
        region = client.register(file).region
        call = client.execution(client.plan(held=1), in_region(region), in_region(region, 64))
        running = client.dispatch.Execute.future(call)
        assert eventually(lambda: file.bytes[64] == BEGUN)
        yield running


@pytest.mark.extended
def test_work_that_outlasts_the_grace_is_given_up(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, grace_s=0.3) as server, working(server) as running:
        server.signal()
        assert server.wait() == 0, "long before the work would be done"
        assert running.exception() is not None
        assert not server.socket.exists()
        assert "given up" in server.log()


HELD = """
import sys, threading
from tilewright_server import app, settings
app.STOP_S = 0.3
class Held(app.Application):
    def make_engine(self, plugins):
        self._parts.callback({held})
        return super().make_engine(plugins)
sys.exit(Held(settings.load()).run())
"""


@pytest.mark.parametrize(
    ("held", "told"), [("threading.Event().wait", "is not waited for"), ("lambda: 1 / 0", "did not end well")]
)
@pytest.mark.extended
def test_what_cannot_be_given_back_does_not_keep_the_process(tmp_path: Path, held: str, told: str) -> None:
    with ServerProcess(tmp_path, [sys.executable, "-c", HELD.format(held=held)], grace_s=1) as server:
        assert server.ready, server.log()
        server.signal()
        assert server.wait() == 0
        assert told in server.log()


@pytest.mark.extended
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, grace_s=60) as server, working(server) as running:
        server.signal()
        assert eventually(lambda: "draining" in server.log())
        assert server.alive
        server.signal()
        assert server.wait() == 128 + signal.SIGTERM
        assert running.exception() is not None


@pytest.mark.extended
def test_many_idle_sessions_hold_no_threads(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, workers=4) as server:
        clients = [Client(server.addresses[0]) for _ in range(40)]
        threads = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
        assert all(client.status() is not None for client in clients)
        assert threads < 40
        for client in clients:
            client.close()


def test_a_bad_setting_is_a_clear_error(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, workers="none") as server:
        assert server.wait() == 1
        assert "TILEWRIGHT_WORKERS" in server.log()
