"""What `deploy/` says is what the server, the tools and Kubernetes' schemas know."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import tilewright
from tilewright_server.endpoints.local.listener import local_path
from tilewright_server.settings import TABLE
from tilewright_tools.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json")
VARIABLES = {row.env for row in TABLE} | {"TILEWRIGHT_TARGET"}


KUBERNETES = DEPLOY / "kubernetes"
OBJECTS = ["pod/deployment.yaml", "gpu/claim.yaml", "node/claim.yaml", "node/daemonset.yaml"]
VERSION = "1.34"
"""The first of Kubernetes that has claims as they stand here."""


def manifest(name: str = "pod/deployment.yaml") -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with kubernetes-validate")
    found = yaml.safe_load((KUBERNETES / name).read_text("utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
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
    given = dict(re.findall(r"--build-arg (\w+)=(\S*)", done.stdout))
    assert set(given) == set(re.findall(r"^ARG (\w+)=", text, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in given["EXTRAS"].split(","))
    for source in re.findall(r"/tmp/context/(\S+)", text):
        assert source == "dist" or (ROOT / source).is_file()
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE), "not root"


def test_scripts_say_how_they_are_used_and_what_is_missing(tmp_path: Path) -> None:
    build, install = DEPLOY / "container" / "build.sh", DEPLOY / "container" / "install.sh"
    assert subprocess.run([build, "tpu"], capture_output=True, check=False).returncode == 2
    done = subprocess.run([install, tmp_path / "v", "server", tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, "there is no wheel" in done.stderr) == (1, True)


@pytest.mark.parametrize("name", OBJECTS)
def test_manifests_are_valid(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validate.validate(manifest(name), VERSION, strict=True)


def test_the_schemas_see_a_mistake() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    wrong = manifest("node/daemonset.yaml")
    wrong["spec"]["template"]["spec"]["resourceClaims"][0]["resourceClaimTemplate"] = "tilewright-node-gpu"
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, VERSION, strict=True)


def kustomize() -> list[str]:
    """The command, of a release that knows what ours are written in; Debian 12 packages 1.20, which does not."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    told = subprocess.run(["kubectl", "version", "--client", "-o", "json"], capture_output=True, check=False)
    found = json.loads(told.stdout or b"{}").get("kustomizeVersion", "v0").lstrip("v").partition(".")[0]
    if not found.isdigit() or int(found) < 5:
        pytest.skip("needs kubectl 1.27 or later")
    return ["kubectl", "kustomize"]


@pytest.mark.parametrize("folder", ["pod", "gpu", "node"])
def test_what_kustomize_makes_is_valid(folder: str) -> None:
    command = kustomize()
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with kubernetes-validate")
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    done = subprocess.run([*command, KUBERNETES / folder], capture_output=True, text=True, check=True)
    made = list(yaml.safe_load_all(done.stdout))
    for item in made:
        validate.validate(item, VERSION, strict=True)
    claims = {item["metadata"]["name"] for item in made if item["kind"] == "ResourceClaimTemplate"}
    (workload,) = (item for item in made if item["kind"] != "ResourceClaimTemplate")
    spec = workload["spec"]["template"]["spec"]
    assert {item["resourceClaimTemplateName"] for item in spec.get("resourceClaims", ())} == claims
    containers = [*spec["initContainers"], *spec["containers"]]
    using = {item["name"] for item in containers if "claims" in item["resources"]}
    assert using == {"pod": set(), "gpu": {"tilewright", "app"}, "node": {"tilewright"}}[folder]
    assert all(item["image"] == f"tilewright:{'cpu' if folder == 'pod' else 'cuda'}" for item in containers)


def test_clients_of_a_node_find_its_server() -> None:
    spec = manifest("node/daemonset.yaml")["spec"]["template"]["spec"]
    env = {item["name"]: item["value"] for item in spec["containers"][0]["env"]}
    command = spec["initContainers"][0]["command"]
    assert env["TILEWRIGHT_LISTEN"] == f"unix:{command[-1]}/tilewright.sock"
    assert spec["volumes"][0]["hostPath"]["path"] == command[-1]
    user, group = (command[command.index(flag) + 1] for flag in ("-o", "-g"))
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (int(user), int(group))
    assert env["TILEWRIGHT_SOCKET_GROUP"] == group
    assert float(env["TILEWRIGHT_GRACE_S"]) < spec["terminationGracePeriodSeconds"]


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


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Both units, with a program that is there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    found = []
    for name in ("tilewright.service", "tilewright.socket"):
        text = (DEPLOY / "systemd" / name).read_text("utf-8")
        found.append(tmp_path / name)
        found[-1].write_text(re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", text, flags=re.MULTILINE))
    return found


def verified(units: list[Path]) -> str:
    command = ["systemd-analyze", "verify", "--man=no", *units]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_units_are_valid(units: list[Path]) -> None:
    said = verified(units)
    assert not re.search(r"tilewright\.(service|socket):", said), said
    with units[1].open("a") as file:
        file.write("[Socket]\nBacklogs=1\n")
    assert "tilewright.socket:" in verified(units), "a mistake is seen"


def wait_for_listener(path: Path, seconds: float = 60) -> None:
    """Wait until `path` takes connections: its file is there from bind() on, before listen()."""
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX) as trial:
            try:
                return trial.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.01)


@pytest.mark.extended
def test_systemd_hands_its_sockets_over(tmp_path: Path) -> None:
    """By its own program for that. (The units themselves are started in ``test_systemd.py``.)"""
    if shutil.which("systemd-socket-activate") is None:
        pytest.skip("needs systemd-socket-activate")
    path, cache = tmp_path / "s.sock", tmp_path / "cache"
    settings = {"LISTEN": f"unix:{path}", "CACHE_DIR": str(cache), "DEVICE": "cpu:0", "SOCKET_MODE": "666"}
    environment = [f"--setenv=TILEWRIGHT_{name}={value}" for name, value in settings.items()]
    environment += [f"--setenv={name}={os.environ[name]}" for name in ("HOME", "PATH")]
    tmp_path.chmod(0o700)
    command = ["systemd-socket-activate", f"--listen={path}", *environment]
    serve = [sys.executable, "-m", "tilewright_tools.cli", "serve"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, *serve], stdout=log, stderr=log)
    try:
        wait_for_listener(path)
        inode = path.stat().st_ino
        with tilewright.connect(f"unix:{path}", launch="server") as client:
            assert client.gemm(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)).sum() == 4
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
        assert path.stat().st_ino == inode, "the socket is systemd's"
    finally:
        process.kill()
        process.wait()
