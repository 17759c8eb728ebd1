"""The units as they are shipped, under a systemd of the tests' own: process 1 of namespaces of its own, whose ``/run``,
``/etc``, ``/opt`` and ``/var`` are thrown away."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import tilewright as tw
from tilewright_proto.inference import inference_pb2

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
SYSTEMD = Path("/lib/systemd/systemd")
SOURCES = "client server tools proto native arch plugins/kit plugins/gemm plugins/grouped_conv plugins/fmha plugins/moe"
TARGETS = ("sysinit", "basic", "shutdown", "sockets", "multi-user", "umount", "final", "local-fs", "network")
LIMIT_S = 90.0
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd /run/units /run/etc /run/work /run/host
mount --bind {root} /run/host
mkdir -p /run/site && mount --bind {site} /run/site
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work /etc
mkdir -p /etc/tilewright
echo 'tilewright:x:54321:54321::/var/lib/tilewright:/usr/sbin/nologin' >> /etc/passwd
echo 'tilewright:x:54321:' >> /etc/group
printf '{settings}' > /etc/tilewright/server.toml
mkdir -p /run/python && mount --bind {base} /run/python
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/tilewright/bin
cat > /opt/tilewright/bin/tilewright <<'END'
#!/bin/sh
export PYTHONPATH={path} LD_LIBRARY_PATH=/run/python/lib
exec /run/python/bin/{python} -m tilewright_tools.cli "$@"
END
chmod 755 /opt/tilewright/bin/tilewright
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t tmpfs -o mode=755 tmpfs /var/cache
for target in {targets}; do printf '[Unit]\\nDefaultDependencies=no\\n' > /run/units/$target.target; done
cp {units}/tilewright.service {units}/tilewright.socket /run/units/
mkdir -p /run/units/tilewright.service.d
printf '[Service]\\nStandardOutput=append:/run/server.log\\nStandardError=append:/run/server.log\\nWatchdogSec=3\\n' \\
    > /run/units/tilewright.service.d/tests.conf
umount -R /sys/fs/cgroup || true
mount -t cgroup2 none /sys/fs/cgroup
export SYSTEMD_UNIT_PATH=/run/units container=other
exec {systemd} --system --unit=multi-user.target --log-target=console --show-status=no
"""


def missing() -> str:
    """The reason why no systemd can be started here; empty if one can be tried."""
    if os.geteuid() != 0:
        return "a systemd of one's own needs root"
    absent = [name for name in ("unshare", "nsenter", "systemctl") if shutil.which(name) is None]
    if absent or not SYSTEMD.exists():
        return f"needs {', '.join(absent) or 'systemd'}"
    return "" if hierarchy() is not None else "no cgroups of version 2 are mounted"


def hierarchy() -> Path | None:
    """The mount of control groups of version 2."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)


pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(missing()), reason=missing())]


def eventually(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Manager:
    """A systemd, seen from outside."""

    def __init__(self, folder: Path, group: Path) -> None:
        self._group = group
        self._log = folder / "systemd.log"
        path = ":".join([*(f"/run/host/{name}" for name in SOURCES.split()), "/run/site"])
        boot = folder / "boot.sh"
        boot.write_text(
            BOOT.format(
                root=shlex.quote(str(ROOT)),
                site=shlex.quote(sysconfig.get_paths()["purelib"]),
                units=shlex.quote(str(UNITS)),
                path=path,
                base=shlex.quote(sys.base_prefix),
                python=Path(sys.executable).resolve().name,
                targets=" ".join(TARGETS),
                settings='device = "cpu:0"\\nlog_level = "info"\\n',
                systemd=SYSTEMD,
            )
        )
        enter = f"echo $$ > {group}/cgroup.procs; exec unshare --pid --mount --uts --ipc --cgroup --fork --mount-proc"
        with self._log.open("w") as log:
            command = ["sh", "-c", f"{enter} --kill-child sh {shlex.quote(str(boot))}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.pid = 0

    def boots(self) -> bool:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")

        def up() -> bool:
            with contextlib.suppress(OSError, IndexError):
                self.pid = int(children.read_text().split()[0])
                return self.control("is-system-running", check=False) in ("running", "degraded")
            return self._process.poll() is not None

        return eventually(up, 20) and self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def enter(self, *command: str, check: bool = True) -> str:
        """Output of a command that runs beside the server."""
        done = subprocess.run(
            ["nsenter", "--all", "--target", str(self.pid), *command],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr, self.log(), self.server_log())
        return done.stdout.strip()

    def control(self, *arguments: str, check: bool = True) -> str:
        return self.enter("systemctl", *arguments, check=check)

    def show(self, name: str) -> str:
        """A property of the service."""
        return self.control("show", "--property", name, "--value", "tilewright.service")

    def file(self, path: str) -> Path:
        """A path of its namespace."""
        return Path(f"/proc/{self.pid}/root{path}")

    def server_log(self) -> str:
        with contextlib.suppress(OSError):
            return self.file("/run/server.log").read_text(errors="replace")
        return ""

    def product_is_right(self) -> bool:
        import numpy as np

        a = np.arange(64, dtype=np.float32).reshape(8, 8)
        with tw.connect(f"unix:{self.file('/run/tilewright/tilewright.sock')}", timeout=60) as client:
            return bool((client.gemm(a, a, launch="server") == a @ a).all())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid or self._process.pid, signal.SIGKILL)
        self._process.wait(LIMIT_S)
        folders = [*sorted(self._group.rglob("*/"), reverse=True), self._group]
        for folder in folders:
            eventually(lambda folder=folder: _removed(folder), 10)  # type: ignore[misc]


def _removed(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError:
            return False
    return True


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    top = hierarchy()
    assert top is not None
    group = top / f"tilewright-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    made = Manager(tmp_path, group)
    try:
        if not made.boots():
            pytest.skip(f"no systemd starts in namespaces here: {made.log()[-500:]}")
        yield made
    finally:
        made.close()


def test_the_unit_starts_reloads_is_watched_upgrades_and_stops(manager: Manager) -> None:
    manager.control("start", "tilewright.service")  # Type=notify: returns when the server has said READY=1
    first = manager.show("MainPID")
    assert manager.show("ActiveState") == "active"
    assert manager.show("StatusText").startswith("serving at unix:/run/tilewright/tilewright.sock")
    assert manager.enter("stat", "-c", "%U %a", "/run/tilewright") == "tilewright 700"
    assert manager.product_is_right()

    manager.file("/etc/tilewright/server.toml").write_text('device = "cpu:0"\nlog_level = "debug"\n')
    manager.control("reload", "tilewright.service")
    assert eventually(lambda: "settings were read again; changed: log_level" in manager.server_log())
    assert eventually(lambda: manager.show("ActiveState") == "active")
    assert manager.show("MainPID") == first

    manager.control("kill", "--kill-whom=main", "--signal=USR2", "tilewright.service")
    assert eventually(lambda: manager.show("MainPID") not in ("0", first)), manager.server_log()
    second = manager.show("MainPID")
    assert eventually(lambda: not manager.file(f"/proc/{first}").exists())
    assert manager.show("ActiveState") == "active" and manager.show("NRestarts") == "0"
    assert manager.product_is_right()

    manager.control("kill", "--kill-whom=main", "--signal=STOP", "tilewright.service")
    assert eventually(lambda: manager.show("NRestarts") == "1"), "the watchdog replaces a server that hangs"
    assert eventually(lambda: manager.show("ActiveState") == "active")
    assert manager.show("MainPID") not in ("0", first, second)
    assert manager.product_is_right()

    manager.control("stop", "tilewright.service")
    assert (manager.show("ActiveState"), manager.show("Result")) == ("inactive", "success"), manager.server_log()


def test_the_socket_starts_the_server_and_outlives_it(manager: Manager) -> None:
    manager.control("start", "tilewright.socket")
    assert manager.show("ActiveState") == "inactive"
    assert manager.enter("stat", "-c", "%U %a", "/run/tilewright/tilewright.sock") == "tilewright 600"
    inode = manager.file("/run/tilewright/tilewright.sock").stat().st_ino
    assert manager.product_is_right(), "the first client starts it"
    assert manager.show("ActiveState") == "active"
    manager.control("stop", "tilewright.service")
    assert manager.show("Result") == "success"
    assert manager.file("/run/tilewright/tilewright.sock").stat().st_ino == inode, "the socket is systemd's"
    assert manager.product_is_right(), "the next client starts it again"


def test_a_tcp_socket_of_systemd_goes_to_a_successor_and_outlives_it(manager: Manager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:  # the network is the tests' own
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    for name, text in (
        ("socket", f"[Socket]\nListenStream={address}\n"),
        ("service", f"[Service]\nEnvironment=TILEWRIGHT_KSERVE_LISTEN={address} TILEWRIGHT_INSECURE=1\n"),
    ):
        folder = manager.file(f"/run/units/tilewright.{name}.d")
        folder.mkdir(exist_ok=True)
        (folder / "tcp.conf").write_text(text)
    manager.control("daemon-reload")
    manager.control("start", "tilewright.socket")
    assert lives(address), "the first client starts it"
    first = manager.show("MainPID")
    manager.control("kill", "--kill-whom=main", "--signal=USR2", "tilewright.service")
    assert eventually(lambda: manager.show("MainPID") not in ("0", first)), manager.server_log()
    assert eventually(lambda: not manager.file(f"/proc/{first}").exists())
    assert lives(address) and manager.product_is_right()
    manager.control("stop", "tilewright.service")
    assert manager.show("Result") == "success", "systemd waits for a successor as for the first: it is its own child"
    assert lives(address), "the next client starts it again"
    assert "a socket was given" not in manager.server_log()


def lives(address: str) -> bool:
    """True if a server of the Open Inference Protocol says so, to a connection of its own."""
    request = inference_pb2.ServerLiveRequest()
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask: Any = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            inference_pb2.ServerLiveRequest.SerializeToString,
            inference_pb2.ServerLiveResponse.FromString,
        )
        return bool(ask(request, timeout=LIMIT_S, wait_for_ready=True).live)
