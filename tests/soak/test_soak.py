"""The soak sees what it is there to see. (Runs of it are made by ``make soak``.)"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server" / "rpc"), str(ROOT / "tests" / "server" / "local")]

from local_harness import Wire  # noqa: E402
from rpc_harness import Client, MemoryFile, ServerProcess  # noqa: E402

from tests.soak import actors  # noqa: E402
from tests.soak.__main__ import GROWTH, Soak  # noqa: E402
from tests.soak.counters import Counts  # noqa: E402
from tests.soak.messages import METHODS, Known, random_request  # noqa: E402
from tests.soak.servers import Held, Served  # noqa: E402


@pytest.mark.parametrize("name", ["wrong", "untyped"])
def test_one_wrong_answer_fails_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    soak = Soak(1.0, 1, tmp_path)
    Counts(soak.path, 3).add("requests", 5)
    assert soak.report(1.0) == 0
    Counts(soak.path, 4).add(name)
    assert soak.report(1.0) == 1
    assert f"FAULT: 1 {name}" in capsys.readouterr().out


def test_too_few_hostile_requests_fail_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak = Soak(1.0, 1, tmp_path, hostile=5)
    Counts(soak.path, 3).add("hostile", 4)
    assert soak.report(1.0) == 1
    assert "FAULT: 4 hostile requests" in capsys.readouterr().out
    Counts(soak.path, 4).add("hostile")
    assert soak.hostile == 5


def test_clients_that_were_never_answered_fail_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak = Soak(1.0, 1, tmp_path)
    soak.names = {100: ("tls", 0), 101: ("tls", 1), 102: ("kserve", 2)}
    Counts(soak.path, 1).add("answered")
    assert soak.report(1.0) == 1
    assert "FAULT: no client (kserve) was ever answered" in capsys.readouterr().out
    Counts(soak.path, 2).add("answered")
    assert not soak.unheard()


def test_a_server_that_ended_fails_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak = Soak(1.0, 1, tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(70)"], text=True)
    ended.wait()
    soak.check(Served("cpu", ended, "unix:/nowhere"))
    assert soak.report(1.0) == 1
    assert "the server (cpu) ended with status 70" in capsys.readouterr().out


def test_a_server_that_grew_fails_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them, in each figure; a short run is not judged."""
    small = Held(100.0, 0.0, 50, 500, 30, 2)
    for name, most in GROWTH._asdict().items():
        for server in ("cpu", "tls", "gpu"):
            for seconds, more in ((300.0, 1), (300.0, 0), (60.0, 1)):
                soak = Soak(seconds / 60, 1, tmp_path)
                grown = small._replace(**{name: getattr(small, name) + most + more})
                soak.judge(
                    {"cpu": small, "tls": small, "gpu": small} | {},
                    {"cpu": small, "tls": small, "gpu": small} | {server: grown},
                )
                assert bool(soak.faults) == (more == 1 and seconds > 120), soak.faults
                assert all(fault.startswith(f"{name} ({server}) grew") for fault in soak.faults)
    capsys.readouterr()


class Every(random.Random):
    """Chooses kinds of packets one after the other, and all else by chance."""

    def choice(self, among: Any) -> Any:
        kinds = self.__dict__.setdefault("kinds", list(actors.UNKNOWN))
        return kinds.pop() if among is actors.UNKNOWN and kinds else super().choice(among)


def test_no_packet_of_the_soak_waits_for_an_answer_that_never_comes(tmp_path: Path) -> None:
    packets = actors.Packets("", 5, Counts(Soak(1.0, 1, tmp_path).path, 3), 60.0)
    packets.rng = Every(5)
    file = MemoryFile(4096)
    with (
        ServerProcess(tmp_path) as server,
        Client(server.addresses[0]) as client,
        Wire(client.opened.local_socket, client.token) as wire,
    ):
        while packets.rng.__dict__.get("kinds", [0]):
            packets.hostile(wire, file)
    file.close()


def test_the_same_seed_gives_the_same_requests() -> None:
    known = Known(b"0" * 16, 1, 2, 3)
    for path in METHODS:
        first, second = ([random_request(path, known, rng) for _ in range(20)] for rng in map(random.Random, (7, 7)))
        assert first == second
        assert path.endswith(("OpenSession", "Statistics")) or len(set(first)) > 5
