"""Environment of NVIDIA's Multi-Process Service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["PIPE_VARIABLE", "mps_environment", "mps_folder", "set_mps_folder"]

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT = "/tmp/nvidia-mps"
"""Where the daemon and CUDA look if nobody says otherwise. NVIDIA Multi-Process Service, environment variables."""


def mps_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the daemon that processes with this environment use."""
    environ = os.environ if environ is None else environ
    return Path(environ.get(PIPE_VARIABLE) or _DEFAULT)


def mps_environment(pipe: Path, log: Path | None = None) -> dict[str, str]:
    """The environment with a daemon's folders."""
    return {**os.environ, PIPE_VARIABLE: str(pipe), **({_LOG_VARIABLE: str(log)} if log is not None else {})}


def set_mps_folder(folder: str) -> str:
    """Let processes that this one starts use the daemon there; none if it is empty. Returns what was set before."""
    before = os.environ.get(PIPE_VARIABLE, "")
    if folder:
        os.environ[PIPE_VARIABLE] = folder
    else:
        os.environ.pop(PIPE_VARIABLE, None)
    return before
