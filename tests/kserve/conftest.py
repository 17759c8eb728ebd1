"""A server of products on the CPU, over a Unix socket and over TCP within the machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "server" / "rpc"), str(TESTS / "server" / "app"), str(Path(__file__).parent)]

from rpc_harness import ServerProcess  # noqa: E402

SERVICE = "/inference.GRPCInferenceService"
GEMM = [sys.executable, str(TESTS / "server" / "app" / "operation_server.py"), "gemm"]


def wait_until_ready(process: ServerProcess) -> None:
    """Until its default device is open, as ServerReady says."""
    ready = SERVICE + "/ServerReady"
    with grpc.insecure_channel(process.addresses[0]) as channel:
        for _ in range(600):
            if channel.unary_unary(ready)(b"", timeout=60) == b"\x08\x01":
                return
            time.sleep(0.1)
    raise AssertionError("not ready in a minute")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("kserve")
    listen = f"unix:{folder / 's.sock'},127.0.0.1:0"
    audit = folder / "audit.jsonl"
    process = ServerProcess(folder, GEMM, listen=listen, insecure="true", cpu_threads=1, audit_log=audit)
    wait_until_ready(process)
    yield process
    assert process.stop() == 0, process.log()
    assert "internal error" not in process.log()
    assert "Traceback" not in process.log(), process.log()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, server: ServerProcess) -> str:
    unix, tcp = server.addresses
    return unix if request.param == "unix" else tcp


@pytest.fixture
def tcp(server: ServerProcess) -> str:
    return server.addresses[1]
