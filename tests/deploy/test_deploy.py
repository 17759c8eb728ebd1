"""What `deploy/` says is what the server, the tools and Kubernetes' schemas know."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tilewright_server.endpoints.local.listener import local_path
from tilewright_server.settings import TABLE
from tilewright_tools.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json")
VARIABLES = {row.env for row in TABLE} | {"TILEWRIGHT_TARGET"}


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with kubernetes-validate")
    found = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_are_settings_and_commands_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert set(re.findall(r"\bTILEWRIGHT_[A-Z_]+", text)) <= VARIABLES
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^[^#]*\btilewright (serve|run|[a-z]+) ", text, re.MULTILINE)) <= commands


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_the_build_script_names_what_the_containerfile_takes(kind: str) -> None:
    env = {**os.environ, "ENGINE": "podman", "PRINT": "1"}
    done = subprocess.run(
        [DEPLOY / "container" / "build.sh", kind], env=env, capture_output=True, text=True, check=True
    )
    text = (DEPLOY / "container" / "Containerfile").read_text("utf-8")
    given = dict(re.findall(r"--build-arg (\w+)=(\S+)", done.stdout))
    assert set(given) == set(re.findall(r"^ARG (\w+)=", text, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in given["EXTRAS"].split(","))
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert source == "dist/*.whl" or (ROOT / source).is_file()
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE), "not root"


def test_scripts_say_how_they_are_used_and_what_is_missing(tmp_path: Path) -> None:
    build, install = DEPLOY / "container" / "build.sh", DEPLOY / "container" / "install.sh"
    assert subprocess.run([build, "tpu"], capture_output=True, check=False).returncode == 2
    done = subprocess.run([install, tmp_path / "v", "server", tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, "there is no wheel" in done.stderr) == (1, True)


def test_the_manifest_is_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validate.validate(manifest(), "1.31", strict=True)


def test_server_and_application_of_the_pod_meet() -> None:
    spec = manifest()["spec"]["template"]["spec"]
    server, client = spec["initContainers"][0], spec["containers"][0]
    env = {item["name"]: item["value"] for item in server["env"]}
    assert server["restartPolicy"] == "Always", "a native sidecar"
    assert [item["value"] for item in client["env"]] == [env["TILEWRIGHT_LISTEN"]]
    assert server["volumeMounts"] == client["volumeMounts"]
    port = env["TILEWRIGHT_HTTP_LISTEN"].rpartition(":")[2]
    assert [str(item["containerPort"]) for item in server["ports"]] == [port]
    assert float(env["TILEWRIGHT_GRACE_S"]) < spec["terminationGracePeriodSeconds"]


def test_the_sockets_of_the_unit_are_those_that_the_server_listens_on() -> None:
    service = (DEPLOY / "systemd" / "tilewright.service").read_text("utf-8")
    text = (DEPLOY / "systemd" / "tilewright.socket").read_text("utf-8")
    sockets = dict(re.findall(r"^(Listen\w+)=(.+)$", text, re.MULTILINE))
    (listen,) = re.findall(r"^Environment=TILEWRIGHT_LISTEN=unix:(.+)$", service, re.MULTILINE)
    assert sockets == {"ListenStream": listen, "ListenSequentialPacket": str(local_path(Path(listen)))}


def test_the_unit_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = (DEPLOY / "systemd" / "tilewright.service").read_text("utf-8")
    unit = tmp_path / "tilewright.service"
    unit.write_text(re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert "tilewright.service:" not in done.stderr, done.stderr
