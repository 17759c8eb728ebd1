"""Settings from the environment: where a server is looked for, whether gRPC survives a fork, where caches are.

The only module of the client that reads the environment. It imports nothing of ours at its top, so that it can speak
before gRPC is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "FORK_VARIABLE",
    "MPS_VARIABLE",
    "START_VARIABLE",
    "TARGET_VARIABLE",
    "ask_for_fork_support",
    "cache_folder",
    "default_target",
    "fork_support",
    "may_start",
    "mps_pipe",
    "normalise_target",
    "serve_command",
    "set_mps_pipe",
    "state_dir",
    "tls_files",
]

TARGET_VARIABLE = "TILEWRIGHT_TARGET"
START_VARIABLE = "TILEWRIGHT_START"
SERVE = "tilewright serve"
"""``0`` keeps ``connect`` from starting a server."""
TLS_PREFIX = "TILEWRIGHT_TLS_"
FORK_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
"""gRPC's own switch. It is read when gRPC is imported."""


MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
"""CUDA's own. It is read when CUDA is first used."""


def mps_pipe() -> str:
    """Folder of the Multi-Process Service that CUDA of this process would use; empty: its default."""
    return os.environ.get(MPS_VARIABLE, "")


def set_mps_pipe(folder: str) -> None:
    """Let CUDA, if it was not started, use the service there; so will processes that this one starts."""
    os.environ[MPS_VARIABLE] = folder


def ask_for_fork_support() -> None:
    """Without it a forked child that calls gRPC crashes. Leaves a choice that was made, and a gRPC that is imported."""
    if "grpc" not in sys.modules:
        os.environ.setdefault(FORK_VARIABLE, "1")


def fork_support() -> bool:
    """True if gRPC of this process works in forked children."""
    return os.environ.get(FORK_VARIABLE, "0").lower() in ("1", "true", "yes", "on")


def may_start(environ: Mapping[str, str] | None = None) -> bool:
    """True if ``connect`` may start the user's own server: it was not told where one is, nor told not to."""
    environ = os.environ if environ is None else environ
    return not environ.get(TARGET_VARIABLE) and environ.get(START_VARIABLE, "1").lower() not in ("0", "false", "no")


def tls_files(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Files of TLS that the environment names, by their names in ``Tls``: ``TILEWRIGHT_TLS_CA``,
    ``TILEWRIGHT_TLS_CERTIFICATE``, ``TILEWRIGHT_TLS_KEY`` and ``TILEWRIGHT_TLS_TOKEN_FILE``."""
    environ = os.environ if environ is None else environ
    names = ("ca", "certificate", "key", "token_file")
    return {name: value for name in names if (value := environ.get(f"{TLS_PREFIX}{name.upper()}", ""))}


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the log of a server in the background."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tilewright"


def default_target(environ: Mapping[str, str] | None = None) -> str:
    """``$TILEWRIGHT_TARGET``, else the socket that ``tilewright serve`` opens by default for this user."""
    environ = os.environ if environ is None else environ
    chosen = environ.get(TARGET_VARIABLE, "")
    if chosen:
        return normalise_target(chosen)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return f"unix:{runtime}/tilewright/tilewright.sock"
    return f"unix:/tmp/tilewright-{os.getuid()}/tilewright.sock"


def serve_command(target: str) -> str:
    """The command that starts a server at a socket; of other targets the plain one."""
    usual = default_target({name: value for name, value in os.environ.items() if name != TARGET_VARIABLE})
    return f"tilewright serve --listen {target}" if target.startswith("unix:") and target != usual else SERVE


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "tilewright"


def normalise_target(target: str) -> str:
    """A gRPC target from what people write: a path becomes ``unix:PATH``; ``HOST:PORT`` and gRPC's own forms stay.

    >>> normalise_target("/run/t.sock")
    'unix:/run/t.sock'
    """
    if not isinstance(target, str) or not target.strip():
        from tilewright.errors import InvalidArgumentError

        raise InvalidArgumentError(
            "the target is empty",
            field="target",
            value=target,
            rule="target_form",
            fix="give unix:PATH or HOST:PORT, or leave it out for the default socket",
        )
    if target.startswith(("/", "./", "../", "~")):
        return f"unix:{Path(target).expanduser().absolute()}"
    return target
