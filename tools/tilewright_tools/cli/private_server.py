"""Servers for commands: the one that is running, or a private one for the length of a command."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright_kit.types.errors import UnavailableError
from tilewright_tools.cli.console.output import working

if TYPE_CHECKING:
    import tilewright

__all__ = ["PrivateServer", "connected", "health_of", "is_listening", "is_serving", "server_for"]

START_SECONDS = 30.0
STOP_SECONDS = 10.0
# The child asks for its own end with the parent's (PR_SET_PDEATHSIG): a function that runs between fork and exec would
# run gRPC's fork handlers, which can wait for ever.
_SERVE = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
sys.argv[0] = "tilewright"
runpy.run_module("tilewright_tools.cli", run_name="__main__")
"""


class PrivateServer:
    """A server process with a socket of its own in a private folder; a context manager whose value is its target.

    It shares the user's cache of compiled kernels. It ends with the ``with`` block, and with this process, however
    that ends.
    """

    def __init__(self, flags: Sequence[str] = (), *, timeout: float = START_SECONDS) -> None:
        self._flags = tuple(flags)
        self._timeout = timeout
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.start_seconds = 0.0
        """How long it took from the start of the process until it was ready."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def __enter__(self) -> str:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="tilewright-")
        except OSError as error:
            raise _no_folder(error) from error
        folder = Path(self._folder.name)
        target = f"unix:{folder / 'socket'}"
        begun = time.monotonic()
        command = [sys.executable, "-c", _SERVE, "serve", "--listen", target, *self._flags]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self._wait(begun + self._timeout)
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.monotonic() - begun
        return target

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def log_tail(self, limit: int = 4000) -> str:
        """The end of what the server printed."""
        if self._folder is None:
            return ""
        try:
            return (Path(self._folder.name) / "log").read_text(errors="replace")[-limit:]
        except OSError:
            return ""

    def _wait(self, deadline: float) -> None:
        """Until the server prints its one line, which says that it is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if ready and self._process.stdout.readline().startswith(b"ready"):
            return
        if ready:
            what = f"ended at its start with exit code {self._process.wait(STOP_SECONDS)}"
        else:
            what = f"was not ready within {self._timeout:g} s"
        raise UnavailableError(
            f"a private server {what}",
            rule="server_start",
            fix="read the log below; `tilewright doctor` says what this machine lacks",
            log_tail=self.log_tail(),
        )


def _no_folder(error: OSError) -> UnavailableError:
    return UnavailableError(
        f"a server of this command's own needs a folder for temporary files: {error.strerror or error}",
        field="TMPDIR",
        rule="temporary_folder",
        fix="let /tmp be a volume that can be written, name another folder by TMPDIR, or a server by --target",
    )


def is_listening(target: str) -> bool:
    """True if something accepts connections at ``target``."""
    try:
        if target.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(target.removeprefix("unix:"))
        else:
            host, _, port = target.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
                pass
    except (OSError, ValueError):
        return False
    return True


def is_serving(target: str) -> bool:
    """True if a server at ``target`` says that it is healthy."""
    return health_of(target) == "serving"


def health_of(target: str, service: str = "", timeout: float = 2.0) -> str:
    """Answer of a server's health service in lower case (``serving``, ``not_serving``); empty if none comes."""
    if not is_listening(target):
        return ""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from tilewright.session.grpc import channel
    from tilewright.session.tls import tls_for

    with channel(target, tls_for(target)) as opened:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(opened).Check(request, timeout=timeout)
        except grpc.RpcError:
            return ""
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)).lower()


@contextlib.contextmanager
def server_for(target: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """The target of a server: the one that was asked for, else the user's own if it runs, else a private one."""
    from tilewright.session.settings import default_target, normalise_target

    own = normalise_target(target) if target else default_target()
    if target or (not flags and is_listening(own)):
        yield own
    else:
        with ExitStack() as stack:
            with working("starting a private server"):
                private = stack.enter_context(PrivateServer(flags))
            yield private


@contextlib.contextmanager
def connected(target: str, flags: Sequence[str] = ()) -> Iterator[tilewright.Client]:
    """A client of ``server_for``'s server."""
    import tilewright

    with server_for(target, flags) as found, tilewright.connect(found) as client:
        yield client
