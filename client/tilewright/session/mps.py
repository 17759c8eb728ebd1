"""The Multi-Process Service of the server's GPUs, which this process joins where it can."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

from tilewright.gpu.cuda import LIBRARY
from tilewright.session.settings import MPS_VARIABLE, mps_pipe, set_mps_pipe

__all__ = ["join"]

_NOT_INITIALIZED = 3
_said = False
_set: str = ""
"""The folder that this module has set."""


def join(folder: str) -> None:
    """Let CUDA of this process use the service whose pipes lie in ``folder``: nothing if that is so already. Warns,
    once in a process, if CUDA was started without it: that cannot be changed any more."""
    global _said, _set
    if not folder or mps_pipe() == folder or not _is_usable(Path(folder)):
        return
    if (not mps_pipe() or mps_pipe() == _set) and not _cuda_has_started():
        set_mps_pipe(folder)
        _set = folder
    elif not _said:
        _said = True
        warnings.warn(
            f"this process uses CUDA without the Multi-Process Service of the server, and cannot join it any more: its"
            f" kernels and the server's take turns, and each turn costs about 0.3 ms (launches in this process do not"
            f" pay it). Connect before CUDA is first used, or set {MPS_VARIABLE}={folder}",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_usable(folder: Path) -> bool:
    """True if the folder is that of a daemon of this user or of root, as this process sees files."""
    try:
        return folder.stat().st_uid in (os.getuid(), 0) and (folder / "control").exists()
    except OSError:
        return False


def _cuda_has_started() -> bool:
    """True if CUDA is initialised in this process; it is not by asking."""
    try:
        count = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).cuDeviceGetCount
    except (OSError, AttributeError):
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)
