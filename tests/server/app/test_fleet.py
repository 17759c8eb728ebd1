"""Servers that share a storage: one compiles, the other does not, and says so in its metrics."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rpc_harness import REAL, ServerProcess, eventually

import tilewright as tw
from tilewright_tools.cli.machine.doctor import _fleet

pytest.importorskip("fsspec", reason="the fleet's storage needs fsspec: pip install 'tilewright[fleet]'")

KERNELS = 'tilewright_fleet_objects_total{kind="kernel",result="%s"}'


def page(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@pytest.mark.extended
def test_a_second_server_compiles_nothing_that_the_first_has(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    a = np.ones((8, 8), np.float32)
    results = []
    for name in ("first", "second"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        (tmp_path / name).mkdir()
        settings = {"device": "cpu:0", "http_listen": port, "fleet": f"file://{tmp_path}/storage"}
        settings |= {"perf_database": tmp_path / name / "perf.sqlite", "fleet_timeout_s": 60}
        with ServerProcess(tmp_path / name, REAL, **settings) as server:
            with tw.connect(server.addresses[0], launch="server") as client:
                results.append(np.asarray(client.gemm(a, a)))
                builds = int(client.kernels.statistics()["artifact_builds"])
            if name == "first":
                assert builds >= 2
                assert eventually(lambda port=port, builds=builds: page(port)[KERNELS % "written"] == builds)
            else:
                assert builds == 0
                assert page(port)[KERNELS % "hit"] >= 2
                assert page(port)["tilewright_fleet_serves"] == 1
            assert "shared through file://" in server.log()
            assert server.stop() == 0
    assert np.array_equal(*results)


def test_a_server_with_a_storage_that_is_none_does_not_start(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, REAL, device="cpu:0", fleet="nonsense://x") as server:
        assert server.wait() == 1
        assert "no URL of object storage" in server.log()


def test_the_doctor_writes_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finding() -> str:
        return next(f"{item.state}: {item.detail}" for item in _fleet())

    monkeypatch.setenv("TILEWRIGHT_FLEET", f"file://{tmp_path}/storage")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    assert finding() == f"ok: file://{tmp_path}/storage: read and written"
    assert list((tmp_path / "storage" / "probes").iterdir()) == []
    monkeypatch.setenv("TILEWRIGHT_FLEET_WRITE", "false")
    assert finding().endswith("reached; this server does not write there")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_FLEET_WRITE", "true")
    monkeypatch.setenv("TILEWRIGHT_FLEET", f"file://{tmp_path}/file")
    assert finding().startswith("note: the fleet's storage does not serve")
    monkeypatch.delenv("TILEWRIGHT_FLEET")
    assert list(_fleet()) == []
