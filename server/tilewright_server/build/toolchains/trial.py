"""Trial loads of shared objects, in a process that may crash, before anybody relies on them."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.build.workers.helper import HelperEndedError, HelperPool
from tilewright_server.build.workers.process import Limits

__all__ = ["Trial"]

_WORKER = "tilewright_server.build.workers.load_worker"
_TIMEOUT_S = 30.0
_ELF_HEADER_BYTES = 20


class Trial:
    """Processes that load for trial, kept for the next binary as long as they live."""

    def __init__(self) -> None:
        self._helpers = HelperPool(_WORKER, Limits(timeout_s=_TIMEOUT_S))

    def load(self, name: str, binary: Path, symbols: Sequence[str], abort: threading.Event | None) -> None:
        """Raise ``BuildFailedError`` (rule ``binary_unloadable``) unless ``binary`` can be loaded and has ``symbols``.

        A binary for another machine than this one is not tried. Raises ``OSError`` if the system refuses the process.
        """
        if _machine(binary) not in (b"", _machine(Path(sys.executable))):
            return
        request = {"ask": "compile", "name": str(binary), "options": list(symbols)}
        try:
            answer, _ = self._helpers.ask(request, b"", abort)
        except HelperEndedError as error:
            if error.outcome == "aborted":
                raise BuildFailedError(
                    f"loading {name} for trial was given up", rule="compiler_aborted", fix="try again"
                ) from error
            if not error.started or (error.outcome == "killed" and error.code == signal.SIGKILL):
                raise OSError(errno.EAGAIN, "the process that loads binaries for trial was killed") from error
            how = "hangs" if error.outcome == "hung" else f"ends its process (signal or status {error.code})"
            raise _unloadable(name, f"it {how}") from error
        if answer.get("state") != "ok":
            raise _unloadable(name, str(answer.get("log", "")))

    def close(self) -> None:
        """End the processes that wait. Another load starts new ones."""
        self._helpers.close()


def _machine(binary: Path) -> bytes:
    """Class, byte order and machine of an ELF file; empty if it is none."""
    with binary.open("rb") as file:
        header = file.read(_ELF_HEADER_BYTES)
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" else b""


def _unloadable(name: str, why: str) -> BuildFailedError:
    return BuildFailedError(
        f"what the compiler made of {name} cannot be loaded",
        rule="binary_unloadable",
        fix="check the server's compiler and its linker with `tilewright doctor`",
        log_tail=why,
    )
