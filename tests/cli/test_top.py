"""`tilewright top`: launches by the server and by clients, live."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright_proto.v1.kernels_pb2 import StatisticsReply
from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.entry import run
from tilewright_tools.cli.private_server import PrivateServer
from tilewright_tools.cli.service.top import rows_between

A, B = np.ones((6, 8), np.float32), np.ones((8, 5), np.float32)


@pytest.mark.extended
def test_launches_of_the_server_and_of_a_client_are_shown(
    tmp_path: Path, kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with PrivateServer(["--device", "cpu:0", "--cache-dir", str(kernel_cache)]) as target:
        ended = threading.Event()

        def work() -> None:
            with tw.connect(target) as client:
                here = client.plan_gemm(A, B, launch="caller").bind(A, B)
                there = client.plan_gemm(A, B, launch="server")
                while not ended.wait(0.001):
                    here()
                    there(A, B)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            found: set[str] = set()
            for _ in range(50):  # until the worker is under way
                assert run(["top", "--target", target, "--json", "--interval", "0.3"]) == Exit.OK
                rows = json.loads(capsys.readouterr().out)["kernels"]
                found = {row["by"] for row in rows}
                if found == {"caller", "server"}:
                    break
            assert found == {"caller", "server"} and all(row["device"] == "cpu:0" for row in rows)
            assert run(["top", "--target", target, "--interval", "0.3"]) == Exit.OK
            head, *lines = capsys.readouterr().out.splitlines()
        finally:
            ended.set()
            worker.join()
        assert head.split("\t") == ["kernel", "device", "by", "launches/s", "us", "busy"]
        assert len(lines) >= 2 and "\x1b" not in "".join(lines), "a pipe gets plain lines, once"
    assert run(["top", "--target", f"unix:{tmp_path}/nobody.sock"]) == Exit.UNAVAILABLE


def test_rows_are_differences_and_rare_samples_stand_for_later_launches() -> None:
    def reply(launches: int, device_ns: int, caller: int, samples: int, ns: int) -> StatisticsReply:
        kernel = StatisticsReply.Kernel(
            name="k", device="cpu:0", launches=launches, device_ns=device_ns, caller_launches=caller,
            caller_samples=samples, caller_sampled_ns=ns,
        )  # fmt: skip
        return StatisticsReply(kernels=[kernel])

    rows = rows_between(reply(10, 50_000, 100, 1, 7000), reply(30, 110_000, 600, 1, 7000), 2.0)
    by = {row.by: row for row in rows}
    assert (by["server"].launches, by["server"].per_second, by["server"].us) == (20, 10.0, 3.0)
    assert (by["caller"].launches, by["caller"].us) == (500, 7.0)
    assert rows_between(reply(30, 9, 5, 0, 0), reply(30, 9, 5, 0, 0), 1.0) == []
