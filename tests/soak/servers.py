"""Servers of the soak, and how much they hold."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil

CLIENT_TESTS = Path(__file__).parents[1] / "client"
sys.path.append(str(CLIENT_TESTS))

__all__ = ["Held", "Served", "cpu_server", "gpu_server", "held", "reset_driver", "tls_server", "workers"]

RESETS = "driver-resets"
CACHE_BYTES = 256 << 10
LIMITS = ["--cache-bytes", str(CACHE_BYTES), "--max-loaded-kernels", "8", "--buffer-bytes", str(256 << 20)]


class Held(NamedTuple):
    """What a server and its processes hold."""

    memory_mib: float
    shared_mib: float
    descriptors: int
    mappings: int
    threads: int
    processes: int


def held(pid: int) -> Held:
    """Of a server's process, and memory of those that it runs."""
    own = psutil.Process(pid)
    children = own.children(recursive=True)
    memory = shared = 0.0
    for process in (own, *children):
        with contextlib.suppress(OSError, psutil.Error):
            status = Path(f"/proc/{process.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            memory += int(fields.get("RssAnon", "0 kB").split()[0]) / 1024
            shared += int(fields.get("RssShmem", "0 kB").split()[0]) / 1024
    mappings = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
    return Held(memory, shared, own.num_fds(), mappings, own.num_threads(), 1 + len(children))


class Served(NamedTuple):
    """A server of the soak."""

    name: str
    process: subprocess.Popen[str]
    target: str
    remote: str = ""
    """Its address of TCP."""

    @property
    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.name != "tls":
            return grpc.insecure_channel(self.target, options=options)
        own = Path(self.target.partition("|")[2])
        files = [(own / name).read_bytes() for name in ("authority.pem", "client.key", "client.pem")]
        return grpc.secure_channel(self.target.partition("|")[0], grpc.ssl_channel_credentials(*files), options=options)


@contextlib.contextmanager
def cpu_server(folder: Path) -> Iterator[Served]:
    """The service as it is, with a small cache, at a Unix socket and over TCP."""
    target = f"unix:{folder}/s"
    command = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--listen", target]
    command += ["--listen", "127.0.0.1:0", "--insecure"]
    command += ["--cache-dir", str(folder / "cache"), "--log-level", "warning", *LIMITS]
    with (folder / "server.log").open("w") as log, _started(command, log, {}) as (process, ready):
        yield Served("cpu", process, target, next(word for word in ready.split() if word.startswith("127.0.0.1:")))


@contextlib.contextmanager
def tls_server(folder: Path) -> Iterator[Served]:
    """The service over TLS, for whoever has a certificate. Its target names the folder of that, too."""
    sys.path.append(str(CLIENT_TESTS.parent / "server" / "app"))
    from authorities import Authority

    authority = Authority(folder)
    own, _ = authority.server(), authority.sign("client")
    command = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--tls-cert", str(own.certificate), "--tls-key", str(own.key), "--tls-client-ca", str(authority.path)]
    command += ["--cache-dir", str(folder / "tls-cache"), "--log-level", "warning", *LIMITS]
    with (folder / "tls.log").open("w") as log, _started(command, log, {}) as (process, ready):
        port = next(word for word in ready.split() if ":" in word.strip("ready:")).rpartition(":")[2]
        yield Served("tls", process, f"localhost:{port}|{folder}")


@contextlib.contextmanager
def gpu_server(folder: Path) -> Iterator[Served]:
    """A service on a GPU whose driver is simulated. Raises ``OSError`` where there is no compiler for that."""
    from simulated_gpu import SERVE, SIMULATED, TAG, built

    library = built(SIMULATED / "libcuda.c", folder / "libcuda.so.1")
    target = f"unix:{folder}/g"
    command = [sys.executable, "-c", SERVE, "serve", "--listen", target, "--cache-dir", str(folder / "gpu-cache")]
    command += ["--device", "cuda:0", "--log-level", "error"]
    driver = {"LD_LIBRARY_PATH": str(folder), "TW_SIMULATED_CUDA": str(library), "TW_SIM_TAG": TAG}
    driver |= {"TW_SIM_DEVICES": "1", "TW_SIM_RESETS": str(folder / RESETS)}
    (folder / RESETS).write_bytes(bytes(8))
    try:
        with (folder / "gpu.log").open("w") as log, _started(command, log, driver) as (process, _):
            yield Served("gpu", process, target)
    finally:
        for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def _started(command: list[str], log: object, more: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its line about where it listens."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **more},  # type: ignore[call-overload]
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("ready"):
            raise OSError(f"the server did not start: {' '.join(command)}")
        try:
            yield process, ready
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()


def reset_driver(folder: Path) -> None:
    """From now on all calls of the simulated driver fail in processes that run."""
    count = int.from_bytes((folder / RESETS).read_bytes(), "little") + 1
    with (folder / RESETS).open("r+b") as file:  # which they have mapped
        file.write(count.to_bytes(8, "little"))


def workers(pid: int) -> list[psutil.Process]:
    """Processes of devices that a server runs."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("devices.worker" in word for word in child.cmdline()):
                found.append(child)
    return found
