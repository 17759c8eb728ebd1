"""`tilewright health`, `status` and `doctor --target`: exit codes that probes go by."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from tilewright_kit.types.errors import UnavailableError
from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.entry import run
from tilewright_tools.cli.private_server import PrivateServer
from tilewright_tools.cli.service.counters import target_of


def test_probes_of_a_running_server_and_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # In a server's own container its settings name the place; what the client's settings name comes first.
        monkeypatch.setenv("TILEWRIGHT_LISTEN", f"{target},127.0.0.1:9")
        assert run(["health"]) == Exit.OK
        monkeypatch.setenv("TILEWRIGHT_TARGET", nobody)
        assert run(["health"]) == Exit.UNAVAILABLE
    for command in (["health", "--quiet"], ["health", "--ready"], ["status"], ["doctor"]):
        assert run([*command, "--target", nobody]) == Exit.UNAVAILABLE, command


def test_a_socket_that_moved_below_an_open_volume_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.delenv("TILEWRIGHT_TARGET", raising=False)
    monkeypatch.setenv("TILEWRIGHT_LISTEN", f"unix:{tmp_path}/s.sock")
    assert target_of("") == f"unix:{tmp_path}/tilewright-{os.geteuid()}/s.sock"


def test_a_command_without_a_folder_for_temporary_files_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose root is read-only, where one was answered with a traceback."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(UnavailableError) as caught:
        PrivateServer().__enter__()
    assert (caught.value.field, caught.value.rule) == ("TMPDIR", "temporary_folder")
