"""Warm starts: what a journal or a bundle names is ready before the server is, and is not built again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rpc_harness import REAL, ServerProcess

import tilewright as tw
from tilewright_server.engine.planning.journal import read_journal
from tilewright_tools.cli import main

pytestmark = pytest.mark.slow

A, B = np.ones((40, 24), np.float32), np.ones((24, 56), np.float32)


def work(client: tw.Client) -> None:
    """Two kernels, one of them for two problems."""
    client.gemm(A, B)
    client.gemm(A, B, activation="relu")
    client.gemm(A[:20], B)


def builds(client: tw.Client) -> int:
    return int(client.kernels.statistics()["artifact_builds"])


def served(folder: Path, **settings: Any) -> ServerProcess:
    folder.mkdir()
    return ServerProcess(folder, REAL, device="cpu:0", **settings)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a server that did the work."""
    folder = tmp_path_factory.mktemp("journal")
    with served(folder / "first", journal=folder / "journal") as server:
        with tw.connect(server.addresses[0], launch="server") as client:
            assert builds(client) <= 1, "its own runtime at the most"
            before = builds(client)
            work(client)
            work(client)
            assert builds(client) > before, "nothing is warm by itself"
        assert server.stop() == 0
    return folder / "journal"


@pytest.mark.parametrize("launch", ["server", "caller"])
@pytest.mark.extended
def test_nothing_of_a_journal_is_built_on_a_requests_path(journal: Path, tmp_path: Path, launch: Any) -> None:
    with served(tmp_path / "second", warm=journal) as server:
        assert "3 plans ready, 0 not" in server.log()
        with tw.connect(server.addresses[0], launch=launch) as client:
            ready = builds(client)
            work(client)
            assert builds(client) == ready > 0


@pytest.mark.extended
def test_nothing_of_a_bundle_is_built_on_a_requests_path(journal: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.twb"
    assert (
        main(["bundle", "build", "--journal", str(journal), "--cache-dir", str(tmp_path / "c"), "-o", str(made)]) == 0
    )
    with tw.load_bundle(made) as bundle:
        assert len(bundle) == 3
    with served(tmp_path / "second", bundle=made) as server:
        assert "3 plans ready, 0 not" in server.log()
        with tw.connect(server.addresses[0], launch="server") as client:
            ready = builds(client)
            work(client)
            assert builds(client) == ready > 0


@pytest.mark.extended
def test_a_server_goes_on_with_its_own_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with served(tmp_path / "first", journal=path, warm=path) as server:
        with tw.connect(server.addresses[0]) as client:
            client.gemm(A, B)
        assert server.stop() == 0
    with served(tmp_path / "second", journal=path, warm=path) as server:
        assert "1 plans ready, 0 not" in server.log()


@pytest.mark.extended
def test_problems_that_cannot_be_made_ready_keep_no_server_from_starting(journal: Path, tmp_path: Path) -> None:
    text = journal.read_text().replace('"cpu:0"', '"cuda:7"', 1)
    (tmp_path / "changed").write_text("no line\n" + text)
    with served(tmp_path / "second", warm=tmp_path / "changed") as server:
        log = server.log()
        assert "line 1 of the journal is skipped" in log and "2 plans ready" in log
        assert "no device cuda:7" in log


@pytest.mark.parametrize(("name", "content"), [("warm", None), ("bundle", None), ("warm", b"x\n"), ("bundle", b"x")])
@pytest.mark.extended
def test_what_is_neither_keeps_it_from_starting(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    server = served(tmp_path / "one", **{name: tmp_path / "file"})
    assert (server.ready, server.wait()) == ("", 1)
    assert "cannot start: " in server.log() and "Fix: " in server.log()


def test_a_journal_counts_launches_in_processes_of_clients(tmp_path: Path) -> None:
    with served(tmp_path / "s", journal=tmp_path / "journal") as server:
        with tw.connect(server.addresses[0], launch="caller") as client:
            bound = client.plan_gemm(A, B).bind(A, B)
            for _ in range(50):
                bound()
        assert server.stop() == 0
    (problem,) = read_journal(tmp_path / "journal")[0]
    assert problem.count == 51, "asked for once, launched 50 times"
