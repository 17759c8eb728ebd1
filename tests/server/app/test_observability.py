"""Metrics, probes, logs and signs of life, as a scraper, a kubelet and systemd see them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_engine import BEGUN
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import REAL, Client, MemoryFile, ServerProcess, eventually, free_port, in_region, inline

import tilewright
from tilewright_server.hosting.monitoring.http import http_address

parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")

ROOT = Path(__file__).resolve().parents[3]
SUFFIX = re.compile(r"_(total|bucket|count|sum)$")
TOTAL = "tilewright_requests_total"
GEMM = "class=interactive,operation=gemm"
EXECUTE = "tilewright.v1.Dispatch/Execute"
SERVE = [sys.executable, "-m", "tilewright_tools.cli", "serve"]


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(port: int) -> Mapping[tuple[str, str], float]:
    """Value of each sample by name and labels, from a page no older than this call."""
    found = {}
    for family in parser.text_string_to_metric_families(get(port, "/metrics")[1]):
        for item in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(item.labels.items()) if name != "le")
            found[item.name, labels] = item.value  # of a histogram's buckets, the last: all
    return found


def eventually_samples(port: int, name: str, labels: str, value: float) -> Mapping[tuple[str, str], float]:
    """Samples, once one of them has its value: what is counted shows a moment after the reply."""
    assert eventually(lambda: samples(port).get((name, labels)) == value), samples(port)
    return samples(port)


def dashboard() -> list[str]:
    """Expressions of the dashboard's panels."""
    text = (ROOT / "deploy" / "grafana" / "tilewright.json").read_text("utf-8")
    return [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]


def metrics_of(expression: str) -> list[str]:
    return re.findall(r"\b(?:tilewright|nv)_[a-z_]+", expression)


def labels_of(expression: str) -> set[str]:
    """Labels that an expression asks for, but for those that a scraper and a histogram bring."""
    sums = {name.strip() for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(",")}
    return (sums | set(re.findall(r"(\w+)=~?\"", expression))) - {"instance", "le"}


def test_a_port_for_probes_serves_health_alone(tmp_path: Path) -> None:
    kind = health_pb2.HealthCheckResponse
    port = free_port()
    with ServerProcess(tmp_path, device="cpu:0", health_listen=f"127.0.0.1:{port}") as server:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert check(health_pb2.HealthCheckRequest(), timeout=60).status == kind.SERVING
            ready = health_pb2.HealthCheckRequest(service="tilewright.ready")
            assert eventually(lambda: check(ready, timeout=60).status == kind.SERVING, 90)
            for method in ("/tilewright.v1.Dispatch/Run", "/tilewright.v1.Memory/OpenSession"):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(method)(b"", timeout=60)
                assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert server.addresses == [f"unix:{tmp_path / 's.sock'}"], "it is no address for clients"
        assert server.stop() == 0, server.log()
    again = ServerProcess(tmp_path, device="cpu:0", health_listen="here")
    assert (again.ready, again.wait()) == ("", 1)
    assert "[health_listen=here]" in again.log()


@pytest.mark.extended
def test_what_is_done_is_counted_and_the_dashboard_names_what_exists(tmp_path: Path) -> None:
    port = free_port()
    with ServerProcess(tmp_path, REAL, http_listen=port, device="cpu:0", max_sessions=1) as server:
        assert eventually(lambda: get(port, "/readyz") == (200, "ok\n"), 90)
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/nothing")[0] == 404
        with tilewright.connect(server.addresses[0], launch="server") as client:
            a = np.ones((8, 8), np.float32)
            for _ in range(3):
                client.gemm(a, a)
            with pytest.raises(tilewright.TilewrightError):
                client.gemm(a, np.ones((7, 8), np.float32))
            with pytest.raises(grpc.RpcError), Client(server.addresses[0]):
                pass
            found = eventually_samples(port, "tilewright_executions_total", GEMM, 3)
            assert found["tilewright_sessions", ""] == 1
        calls = sum(value for (name, labels), value in found.items() if name == TOTAL and "code=OK" in labels)
        assert calls >= 3
        assert found["tilewright_device_seconds_count", GEMM] == 3
        assert found["tilewright_device_seconds_sum", GEMM] > 0
        assert found["tilewright_queue_seconds_count", GEMM] == 3
        assert found["tilewright_plan_seconds_count", GEMM] >= 1
        assert found["tilewright_build_seconds_count", GEMM] >= 1
        assert found["nv_inference_request_success", "model=tilewright.gemm,version=1"] == 3
        assert found["tilewright_ready", ""] == 1
        failed = "class=interactive,code=invalid_argument,operation=gemm"
        assert found["tilewright_execution_failures_total", failed] == 1
        assert found["tilewright_request_seconds_count", f"class=interactive,method={EXECUTE}"] == 3
        assert not [labels for _, labels in found if "class=batch" in labels]
        with tilewright.connect(server.addresses[0], launch="server", priority="batch") as client:
            client.gemm(a, a)
        also = eventually_samples(port, "tilewright_executions_total", GEMM.replace("interactive", "batch"), 1)
        assert also["tilewright_device_seconds_count", GEMM.replace("interactive", "batch")] == 1
        assert also["tilewright_device_seconds_count", GEMM] == 3
        assert also["tilewright_request_seconds_count", f"class=batch,method={EXECUTE}"] == 1
        assert also["tilewright_requests_total", f"class=batch,code=OK,method={EXECUTE}"] == 1
        assert also["nv_inference_request_success", "model=tilewright.gemm,version=1"] == 4
        assert found["tilewright_device_busy_seconds_total", "device=cpu:0"] > 0
        assert found["tilewright_choices_renewed_total", ""] == 0
        assert found["tilewright_device_open", "device=cpu:0,kind=cpu"] == 1
        assert found["tilewright_quota_limit", "resource=sessions"] == 1
        assert found["tilewright_quota_refusals_total", "resource=sessions"] == 1
        assert found["tilewright_connections_total", "result=accepted"] >= 2
        assert found["tilewright_connections_total", "result=refused"] == 0
        assert found["process_resident_memory_bytes", ""] > 0
        assert re.search(r" INFO \S+: built \w*gemm\w* arch=\S+ ms=\d+ request=\S+$", server.log(), re.MULTILINE), (
            server.log()
        )
        families = {family.name: family for family in parser.text_string_to_metric_families(get(port, "/metrics")[1])}
        for expression in dashboard():
            for family in (families[SUFFIX.sub("", name)] for name in metrics_of(expression)):
                labels = {name for sample in family.samples for name in sample.labels}
                assert not family.samples or labels_of(expression) <= labels, expression
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        try:  # hundreds of scrapers and silent ones leave the probes alone
            assert all(get(port, "/metrics")[0] == 200 for _ in range(200))
            assert get(port, "/healthz")[0] == 200
        finally:
            for item in silent:
                item.close()


def test_metrics_are_off_unless_they_are_asked_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        assert "HTTP" not in server.log()


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with ServerProcess(tmp_path, http_listen=other.getsockname()[1]) as server:
            assert server.wait() == 1
            assert "cannot listen for HTTP" in server.log()


def test_addresses_of_http_are_loopback_unless_they_say_more() -> None:
    assert http_address("9464") == ("127.0.0.1", 9464)
    assert http_address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert http_address("[::1]:9464") == ("::1", 9464)


def test_readiness_is_a_health_service_of_its_own(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        request = health_pb2.HealthCheckRequest(service="tilewright.ready")
        serving = health_pb2.HealthCheckResponse.SERVING
        assert eventually(lambda: stub.Check(request, timeout=5).status == serving)
        watch = stub.Watch(request)
        assert next(watch).status == serving
        server.signal()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_probes_hear_that_a_server_drains_and_why(tmp_path: Path) -> None:
    kind = health_pb2.HealthCheckResponse
    probes, pages = free_port(), free_port()
    settings = {"health_listen": f"127.0.0.1:{probes}", "http_listen": pages}
    with ServerProcess(tmp_path, **settings) as server, Client(server.addresses[0]) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        assert eventually(lambda: get(pages, "/readyz") == (200, "ok\n"))
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "tilewright.ready")]
        assert [next(watch).status for watch in watches] == [kind.SERVING, kind.SERVING]
        with contextlib.closing(MemoryFile(4096)) as file:  # a launch that goes on for as long as the server waits
            region = client.register(file).region
            call = client.execution(client.plan(held=1), in_region(region), in_region(region, 64))
            running = client.dispatch.Execute.future(call)
            assert eventually(lambda: file.bytes[64] == BEGUN)
            server.signal()
            assert eventually(lambda: get(pages, "/readyz") == (503, "the server is shutting down\n"))
            assert get(pages, "/healthz") == (200, "ok\n")
            assert [next(watch).status for watch in watches] == [kind.NOT_SERVING, kind.NOT_SERVING]
            for address in (server.addresses[0], f"127.0.0.1:{probes}"):
                with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                    with pytest.raises(grpc.RpcError) as caught:
                        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert get(pages, "/readyz")[0] == 503 and not running.done()
            server.signal()  # at once


def test_probes_wait_until_the_warm_start_has_ended(tmp_path: Path) -> None:
    probes, pages = free_port(), free_port()
    journal = tmp_path / "journal"
    os.mkfifo(journal)  # read by the warm start, which lasts until the other end is closed
    settings = {"health_listen": f"127.0.0.1:{probes}", "http_listen": pages, "warm": journal}
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(ServerProcess, tmp_path, **settings)
        with journal.open("wb"):  # waits for the reader
            for address in (f"unix:{tmp_path / 's.sock'}", f"127.0.0.1:{probes}"):
                with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                    with pytest.raises(grpc.RpcError) as caught:
                        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
                    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            with socket.create_connection(("127.0.0.1", pages), 1) as probe:
                probe.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                with pytest.raises(TimeoutError):
                    probe.recv(1)
            assert not starting.done()
        with starting.result(60) as server:
            assert eventually(lambda: get(pages, "/readyz") == (200, "ok\n")), server.log()


def test_the_log_is_json_names_calls_and_keeps_secrets(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, log_level="debug", log_format="json") as server:
        with Client(server.addresses[0]) as client:
            client.copy(inline(bytes(64)))
            token = client.token
            with pytest.raises(grpc.RpcError):
                client.copy(inline(bytes(63)))
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log().splitlines()]
        calls = [line for line in lines if line.get("method") == "tilewright.v1.Dispatch/Run"]
        assert [(line["level"], line["code"]) for line in calls] == [("debug", "OK"), ("info", "INVALID_ARGUMENT")]
        assert all(line["client"].startswith("uid:") and line["request"] and line["ms"] > 0 for line in calls)
        assert token.hex() not in server.log() and repr(token)[2:-1] not in server.log()


def test_refusals_by_the_thousand_are_few_lines(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        with Client(server.addresses[0]) as client:
            for _ in range(200):
                with pytest.raises(grpc.RpcError):
                    client.copy(inline(bytes(63)))
        assert server.stop() == 0
        assert 20 <= server.log().count("refused:") <= 60


@pytest.mark.extended
def test_a_service_manager_hears_of_start_life_reload_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(30)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    config = tmp_path / "server.toml"
    config.write_text('log_level = "info"\nmax_sessions = 7\n')

    def until(word: str) -> None:
        while word not in manager.recv(4096).decode():
            pass

    with manager, ServerProcess(tmp_path, [*SERVE, "--config", str(config)], device="cpu:0") as server:
        until("READY=1")
        until("WATCHDOG=1")
        config.write_text('log_level = "debug"\nmax_sessions = 9\nworkers = 8\n')
        server.signal(signal.SIGHUP)
        until("RELOADING=1")
        until("READY=1")
        assert eventually(lambda: "changed: max_sessions, log_level" in server.log())
        assert "not changed before the server is started again: workers" in server.log()
        config.write_text("nonsense = 1\n")
        server.signal(signal.SIGHUP)
        assert eventually(lambda: "the settings stay as they are" in server.log())
        server.signal()
        until("STOPPING=1")
        assert server.wait() == 0
