"""Where a server is looked for. The only module of the client that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tilewright.errors import InvalidArgumentError

__all__ = ["TARGET_VARIABLE", "default_target", "normalise_target"]

TARGET_VARIABLE = "TILEWRIGHT_TARGET"


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


def normalise_target(target: str) -> str:
    """A gRPC target from what people write: a path becomes ``unix:PATH``; ``HOST:PORT`` and gRPC's own forms stay.

    >>> normalise_target("/run/t.sock")
    'unix:/run/t.sock'
    """
    if not isinstance(target, str) or not target.strip():
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
