"""The image of `deploy/container`, built and run. It needs podman, and Debian's mirror and PyPI for what goes into it.
By hand: ``pytest -n 0 -m exhaustive tests/deploy/test_container.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "server" / "devices")]
POD = ROOT / "deploy" / "kubernetes" / "pod" / "deployment.yaml"
BUILD = ROOT / "deploy" / "container" / "build.sh"
PYTHON = "3.11"
"""Version of the base below. (The script's own base comes from a registry; one of Debian's packages needs none.)"""
BASE = ["mmdebstrap", "--variant=minbase", "--include=python3,ca-certificates", "bookworm", "-"]
MIRROR = "http://deb.debian.org/debian"
SOCKET = "tilewright-10001/tilewright.sock"
"""Place of the socket in a volume that is open to others."""
# As small as a machine may allow: raising a limit is not everybody's right.
RUN = ["run", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--network=none"]
SAFE = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges"]

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(1800)]

Podman = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", **env}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def podman() -> Podman:
    missing = [name for name in ("podman", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root, and {' and '.join(missing)} (apt-get install podman runc mmdebstrap)")
    runtime = ["--runtime", "runc"] if shutil.which("runc") else []
    return lambda *arguments: run("podman", *runtime, *arguments)


@pytest.fixture(scope="module")
def base(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A system with Python, but without its modules venv and pip, as distributions have it."""
    archive = tmp_path_factory.mktemp("base") / "base.tar"
    with archive.open("wb") as file:
        made = subprocess.run([*BASE, MIRROR], stdout=file, stderr=subprocess.PIPE, check=False)
    if made.returncode:
        pytest.skip(f"Debian's mirror is not reached: {made.stderr.decode()[-300:]}")
    name = f"localhost/tilewright-test-base:{os.getpid()}"
    done = podman("import", archive, name)
    assert done.returncode == 0, done.stderr
    archive.unlink()
    yield name
    podman("rmi", "--force", name)


def wheels(folder: Path, *extras: str) -> Path:
    """A folder with all that an image of these extras needs, without the project itself."""
    toml = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--python-version={PYTHON}"]
    done = run(*pip, "--dest", folder, *[item for item in wanted if not item.startswith("tilewright")])
    if done.returncode:
        pytest.skip(f"packages of Python are not reached: {done.stderr[-300:]}")
    return folder


@contextmanager
def built(podman: Podman, kind: str, base: str, packages: Path) -> Iterator[str]:
    """An image of a kind, by name, until it is removed."""
    name = f"localhost/tilewright-test-{kind}:{os.getpid()}"
    done = run(BUILD, kind, name, BASE=base, WHEELS=str(packages), ENGINE="podman")
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        yield name
    finally:
        podman("rmi", "--force", name)


@pytest.fixture(scope="module")
def image(podman: Podman, base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    packages = wheels(tmp_path_factory.mktemp("wheels"), "server", "metrics", "compiler")
    with built(podman, "cpu", base, packages) as name:
        yield name


@contextmanager
def serving(podman: Podman, image: str, *options: str) -> Iterator[str]:
    """A container of a server, by name, while it serves."""
    name = f"tilewright-test-{os.getpid()}"
    done = podman(*RUN, "--detach", f"--name={name}", *options, image)
    assert done.returncode == 0, done.stderr
    try:
        deadline = time.monotonic() + 120
        while podman("exec", name, "tilewright", "health", "--ready").returncode:
            logs = podman("logs", name)
            assert time.monotonic() < deadline, logs.stdout + logs.stderr
            time.sleep(0.5)
        yield name
    finally:
        podman("rm", "--force", "--volumes", name)


def test_a_server_of_no_rights_serves_clients_outside_through_a_shared_folder(podman: Podman, image: str) -> None:
    """Its root is read-only and has no ``/tmp`` to write; the folder is open to everybody, as an ``emptyDir`` is."""
    with tempfile.TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True) as folder:
        # A short path: those of Unix sockets have at most 107 bytes, ``.local`` at its end included.
        shared = Path(folder)
        shared.chmod(0o777)
        check_clients_outside(podman, image, shared)


def check_clients_outside(podman: Podman, image: str, shared: Path) -> None:
    volume = f"--volume={shared}:/run/tilewright"
    listen = [volume, "--env=TILEWRIGHT_LISTEN=unix:/run/tilewright/tilewright.sock"]
    product = ["run", "gemm", "33", "65", "129", "--validate", "--target"]
    with serving(podman, image, *SAFE, *listen, "--volume=/var/cache/tilewright") as name:
        assert podman("exec", name, "id", "-u").stdout.strip() == "10001"
        # From the machine itself, and from another container, which shares neither processes nor memory by name.
        done = run(sys.executable, "-m", "tilewright_tools.cli", *product, f"unix:{shared / SOCKET}")
        assert done.returncode == 0 and "success" in done.stdout, done.stdout + done.stderr
        done = podman(*RUN, "--rm", *SAFE, volume, image, *product, f"unix:/run/tilewright/{SOCKET}")
        assert done.returncode == 0 and "success" in done.stdout, done.stdout + done.stderr
        # Compilers have left processes behind. The first process ended each of them.
        states = podman("exec", name, "sh", "-c", "grep -h ^State /proc/[0-9]*/status").stdout
        assert "Z (zombie)" not in states
        started = time.monotonic()
        assert podman("stop", "--time=60", name).returncode == 0
        assert time.monotonic() - started < 50, "it ends by SIGTERM"
        (state,) = json.loads(podman("inspect", name).stdout)
        assert state["State"]["ExitCode"] == 0, podman("logs", name).stderr


def test_a_cache_on_a_read_only_root_is_said_with_what_helps(podman: Podman, image: str) -> None:
    done = podman(*RUN, "--rm", *SAFE, "--env=TILEWRIGHT_LISTEN=127.0.0.1:0", "--env=TILEWRIGHT_INSECURE=1", image)
    assert done.returncode == 1
    assert "cannot be written: EROFS" in done.stderr and "below a volume where the root is read-only" in done.stderr


def test_the_image_keeps_no_wheel(podman: Podman, image: str) -> None:
    found = podman(
        *RUN, "--rm", "--entrypoint=find", image, "/", "-xdev", "-name", "*.whl", "-not", "-path", "*/ensurepip/*"
    )
    assert found.stdout.split() == [
        path for path in found.stdout.split() if path.startswith("/usr/share/python-wheels")
    ]


def test_what_changes_in_the_project_is_in_the_next_image(podman: Podman, image: str) -> None:
    """No layer of an earlier build is taken for it: what a step mounts is not in the keys of podman's cache."""
    printed = run(BUILD, "cpu", image, PRINT="1", ENGINE="podman").stdout
    assert " --no-cache " in printed


def test_the_pods_containers_work_together_as_the_manifest_has_them(podman: Podman, image: str) -> None:
    """Commands, variables, volumes, users and probes of deploy/kubernetes/pod, with folders for its volumes; the second
    container is in the namespaces of processes and network of the first, as in a pod."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with kubernetes-validate")
    spec = yaml.safe_load(POD.read_text("utf-8"))["spec"]["template"]["spec"]
    (server,), (app,) = spec["initContainers"], spec["containers"]
    names = [f"tilewright-test-{os.getpid()}-{item['name']}" for item in (server, app)]
    probe = server["startupProbe"]["httpGet"]
    (port,) = (item["containerPort"] for item in server["ports"] if item["name"] == probe["port"])
    ask = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}{probe['path']}').status)"
    with tempfile.TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True) as folder:
        for volume in spec["volumes"]:
            (Path(folder) / volume["name"]).mkdir()
            (Path(folder) / volume["name"]).chmod(0o777)  # as an emptyDir

        def options(container: dict[str, Any]) -> list[str]:
            user = f"--user={spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
            made = ["--detach", user, "--cap-drop=all", "--security-opt=no-new-privileges"]
            made += [f"--env={item['name']}={item['value']}" for item in container["env"]]
            return made + [
                f"--volume={folder}/{item['name']}:{item['mountPath']}" for item in container["volumeMounts"]
            ]

        try:
            done = podman(*RUN, f"--name={names[0]}", *options(server), image, *server["args"])
            assert done.returncode == 0, done.stderr
            seconds = server["startupProbe"]["periodSeconds"]
            for _ in range(server["startupProbe"]["failureThreshold"]):
                if podman("exec", names[0], "python3", "-c", ask).stdout.strip() == "200":
                    break
                time.sleep(seconds)
            within = [
                f"--pid=container:{names[0]}",
                f"--network=container:{names[0]}",
                f"--entrypoint={app['command'][0]}",
            ]
            limits = [item for item in RUN[1:] if not item.startswith("--network")]
            command = [*app["command"][1:], *app["args"]]
            done = podman("run", *limits, f"--name={names[1]}", *within, *options(app), image, *command)
            assert done.returncode == 0, done.stderr
            deadline = time.monotonic() + 300
            while "success" not in (logs := podman("logs", names[1])).stdout:
                (state,) = json.loads(podman("inspect", names[1]).stdout)
                assert state["State"]["Running"] and time.monotonic() < deadline, logs.stdout + logs.stderr
                time.sleep(0.5)
            podman("rm", "--force", names[1])
            assert podman("stop", f"--time={spec['terminationGracePeriodSeconds']}", names[0]).returncode == 0
            (state,) = json.loads(podman("inspect", names[0]).stdout)
            assert state["State"]["ExitCode"] == 0, podman("logs", names[0]).stderr
        finally:
            for name in reversed(names):
                podman("rm", "--force", "--volumes", name)


def simulated(folder: Path, kind: str) -> list[str]:
    """Options of a container that has a simulated driver where a GPU's own would be mounted."""
    import simulated_hip

    if kind == "rocm":
        simulated_hip.build(folder)
        options = [f"--volume={folder}:/opt/rocm/lib:ro", "--env=LD_LIBRARY_PATH=/opt/rocm/lib"]
        return [*options, "--env=TW_SIM_ARCH=gfx942", "--env=TW_SIM_DEVICES=1", "--env=TW_SIM_TAG=container"]
    source = ROOT / "tests" / "server" / "devices" / "cuda_simulated" / "libcuda.c"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source]
    done = run("cc", *flags, "-lpthread", "-lrt")
    assert done.returncode == 0, done.stderr
    options = [f"--volume={folder}:/usr/local/nvidia/lib64:ro", "--env=LD_LIBRARY_PATH=/usr/local/nvidia/lib64"]
    return [*options, "--env=TW_SIM_DEVICES=1", "--env=TW_SIM_TAG=container"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the simulated driver")
@pytest.mark.parametrize(("kind", "extra", "device"), [("cuda", "cuda", "cuda:0"), ("rocm", "hip", "hip:0")])
def test_images_for_gpus_open_a_device_of_the_driver_that_is_mounted(
    podman: Podman, base: str, tmp_path: Path, kind: str, extra: str, device: str
) -> None:
    """Their bases in use come from registries; this one of Debian has neither a driver nor ROCm."""
    packages, driver = tmp_path / "wheels", tmp_path / "driver"
    packages.mkdir()
    driver.mkdir()
    for folder in (driver, *driver.parents[:2]):
        folder.chmod(0o755)
    with built(podman, kind, base, wheels(packages, "server", "metrics", extra)) as name:
        without = podman(*RUN, "--rm", *SAFE, name, "doctor")
        assert f"no {extra} device" in without.stdout, without.stdout + without.stderr
        mounted = simulated(driver, kind)
        seen = podman(*RUN, "--rm", *SAFE, *mounted, name, "doctor")
        assert f"{device}: Simulated" in seen.stdout, seen.stdout + seen.stderr
        options = [*SAFE, *mounted, "--volume=/run/tilewright", "--volume=/var/cache/tilewright"]
        options += ["--env=TILEWRIGHT_LISTEN=unix:/run/tilewright/s.sock", f"--env=TILEWRIGHT_DEVICE={device}"]
        with serving(podman, name, *options) as server:  # ready: the device is open
            assert podman("stop", "--time=60", server).returncode == 0
            (state,) = json.loads(podman("inspect", server).stdout)
            assert state["State"]["ExitCode"] == 0, podman("logs", server).stderr
