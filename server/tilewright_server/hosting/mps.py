"""The Multi-Process Service of this server: a daemon that runs already, or one of its own."""

from __future__ import annotations

import logging
import select
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from tilewright_kit.types.errors import UnavailableError, UnsupportedError
from tilewright_server.devices.cuda.mps.daemon import CONTROL, COST, INSTALL, find_daemon
from tilewright_server.devices.cuda.settings import set_mps_folder
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Mps"]

log = logging.getLogger("tilewright")

_START_S = 40.0
_END_S = 5.0
"""How long the server's end waits for the daemon's; the guard goes on without it."""
_LONGEST = 80
"""Bytes of the folder's path: sockets in it have names of up to 24, and paths of 107."""


class Mps:
    """``start`` it before any device is opened, and ``close`` it when all are closed."""

    def __init__(self, wish: str, runtime: Path) -> None:
        """``wish`` is the setting ``mps``; ``runtime`` the folder that a daemon of the server's own gets its one in."""
        self.folder = ""
        """The pipes of the daemon; empty if there is none."""
        self._wish = wish
        self._runtime = runtime
        self._guard: subprocess.Popen[bytes] | None = None
        self._before: str | None = None

    def check_succession(self) -> None:
        """Raise ``UnsupportedError`` if the daemon is this server's: it would end with it, under a successor's feet."""
        if self._guard is not None:
            raise UnsupportedError(
                "this server's own MPS daemon ends with it",
                field="mps",
                rule="succession",
                fix="run the daemon apart from the server, or stop this server and start the next",
            )

    def start(self, has_gpu: bool) -> None:
        """Let processes of devices use a daemon. ``has_gpu``: there is one of NVIDIA's. Raises ``UnavailableError`` if
        it is required and there is none."""
        if self._wish == "off":
            return
        if not has_gpu:
            self._lacks("there is no NVIDIA GPU here", "start the server without --mps require")
            return
        found = find_daemon()
        if found.folder is not None:
            self._use(str(found.folder), "runs for this user")
        elif shutil.which(CONTROL) is None:
            self._lacks(found.problem, INSTALL)
        else:
            self._start_own()

    def _lacks(self, problem: str, fix: str) -> None:
        if self._wish == "require":
            raise UnavailableError(
                f"the Multi-Process Service is required: {problem}", field="mps", value=self._wish, rule="mps", fix=fix
            )
        log.info("without the Multi-Process Service (%s) %s", problem, COST)

    def _use(self, folder: str, how: str) -> None:
        self.folder = folder
        self._before = set_mps_folder(folder)
        log.info("the Multi-Process Service %s, with its pipes in %s", how, folder)

    def _start_own(self) -> None:
        folder = self._own_folder()
        command = run_module("tilewright_server.devices.cuda.mps.guard", str(folder))
        try:
            self._guard = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._lacks(f"its daemon cannot be started: {error.strerror}", "see the server's log")
            return
        assert self._guard.stdout is not None
        said = b"error: its daemon does not start"
        if select.select([self._guard.stdout], [], [], _START_S)[0]:
            said = self._guard.stdout.readline().strip() or said
        self._guard.stdout.close()
        if said == b"ready":
            self._use(str(folder / "pipe"), "was started")
            return
        self.close()
        problem = said.decode("utf-8", "replace").removeprefix("error: ")
        self._lacks(problem, "see `tilewright doctor`, or start the server with --mps auto")

    def _own_folder(self) -> Path:
        self._runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="mps-", dir=self._runtime))
        if len(bytes(folder)) <= _LONGEST:
            return folder
        folder.rmdir()
        return Path(tempfile.mkdtemp(prefix="tilewright-mps-"))

    def close(self) -> None:
        """End a daemon of the server's own when nobody uses the GPU through it any more. Idempotent."""
        if self._before is not None:
            set_mps_folder(self._before)
            self._before = None
        guard, self._guard = self._guard, None
        self.folder = ""
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            ended = threading.Thread(target=guard.wait, name="mps", daemon=True)
            ended.start()
            ended.join(_END_S)
