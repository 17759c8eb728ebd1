"""Streams of GPUs as people name them, and the current ones of libraries that are loaded. Imports none of those."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tilewright.errors import InvalidArgumentError
from tilewright.gpu.driver import LEGACY_STREAM

__all__ = ["current_stream", "stream_handle", "stream_reader"]


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream: an integer (0 and 1: the legacy default stream, 2: the thread's own), or a
    stream of PyTorch, CuPy, hip-python, or anything with ``__cuda_stream__``. Raises ``InvalidArgumentError``.
    """
    found: Any = stream
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__
        found = (found() if callable(found) else found)[1]
    elif hasattr(stream, "cuda_stream"):
        found = stream.cuda_stream
    elif hasattr(stream, "ptr"):
        found = stream.ptr
    elif hasattr(stream, "as_c_void_p"):  # hip-python
        found = int(stream)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise InvalidArgumentError(
            "that is no stream of a GPU",
            field="stream",
            value=stream,
            rule="stream_handle",
            fix="pass a stream of PyTorch, CuPy or hip-python, or the driver's handle as an int",
        )
    return found or LEGACY_STREAM


def current_stream(library: str, ordinal: int) -> int:
    """The stream that ``library`` (``torch``, ``cupy``) would use on a device now; others: the legacy default one."""
    module = sys.modules.get(library) if library else None
    if module is None:
        return LEGACY_STREAM
    if library == "torch":
        raw = getattr(getattr(module, "_C", None), "_cuda_getCurrentRawStream", None)
        found = raw(ordinal) if raw is not None else module.cuda.current_stream(ordinal).cuda_stream
    elif library == "cupy":
        found = module.cuda.get_current_stream().ptr
    else:
        return LEGACY_STREAM
    return int(found) or LEGACY_STREAM


def stream_reader(library: str, ordinal: int) -> Callable[[], int]:
    """Return what reads ``current_stream``, for many calls; it may answer 0 for the default one."""
    if library == "torch":
        raw = getattr(getattr(sys.modules.get(library), "_C", None), "_cuda_getCurrentRawStream", None)
        if raw is not None:
            return functools.partial(raw, ordinal)
    return functools.partial(current_stream, library, ordinal)
