"""`tilewright health`, `status` and `doctor --target`: exit codes that probes go by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.entry import run
from tilewright_tools.cli.private_server import PrivateServer


def test_probes_of_a_running_server_and_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"unix:{tmp_path}/nobody.sock"
    with PrivateServer(["--device", "cpu:0"]) as target:
        assert run(["health", "--target", target]) == Exit.OK
        assert capsys.readouterr().out == f"{target}: serving\n"
        assert run(["status", "--target", target, "--json"]) == Exit.OK
        record = json.loads(capsys.readouterr().out)
        assert record["target"] == target and record["sessions"] == 0
        assert {item["name"] for item in record["plugins"]} >= {"cpu", "gemm"}
        assert run(["status", "--target", target]) == Exit.OK
        assert "sessions" in capsys.readouterr().out
    for command in (["health", "--quiet"], ["health", "--ready"], ["status"], ["doctor"]):
        assert run([*command, "--target", nobody]) == Exit.UNAVAILABLE, command
