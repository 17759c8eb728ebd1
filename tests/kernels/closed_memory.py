"""Memory of tensors for kernels that run without a server: inputs end at a page that nobody may touch, so that a kernel
that reads outside them stops the process; outputs and what lies around them are poisoned.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.numerics.compare import poison
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["CANARY", "MARGIN", "NAN", "Tensor", "scratch_of", "stored"]

Array = npt.NDArray[Any]
MARGIN = 64
"""Bytes before and behind every output that nobody may write."""
CANARY = 0xA5
NAN = 0xFF
"""A byte that, repeated, is a NaN in every float type."""
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Tensor:
    """Storage of one tensor: its bytes, and the tensor as NumPy sees it."""

    raw: npt.NDArray[np.uint8]
    start: int
    view: Array
    desc: TensorDesc
    margin: bool

    @property
    def address(self) -> int:
        return int(self.raw.ctypes.data) + self.start

    def overrun(self) -> bool:
        """True if bytes around the tensor, or between its elements, were written."""
        if not self.margin:
            return False
        own = np.zeros(self.raw.size, dtype=bool)
        if self.desc.size:
            width = self.desc.dtype.bytes
            offsets = sum(np.indices(self.desc.shape)[dim] * step for dim, step in enumerate(self.desc.strides))
            for byte in range(width):
                own[self.start + np.asarray(offsets).ravel() * width + byte] = True
        return bool(np.any(self.raw[~own] != CANARY))


def stored(desc: TensorDesc, values: Array | None = None) -> Tensor:
    """An input with ``values``, behind which a page is closed; or an output, poisoned, with margins."""
    if values is not None:
        raw = _closed(desc.nbytes)
        start = (raw.size - desc.nbytes) // 64 * 64 if desc.nbytes else 0
    else:
        raw = np.full(desc.nbytes + 2 * MARGIN + 64, CANARY, dtype=np.uint8)
        start = MARGIN + -(raw.ctypes.data + MARGIN) % 64
    width = desc.dtype.bytes
    words = np.lib.stride_tricks.as_strided(
        raw[start : start + max(desc.nbytes, 0)].view(f"u{width}"), desc.shape, [step * width for step in desc.strides]
    )
    if desc.size:
        given = poison(desc.dtype, desc.shape) if values is None else np.asarray(values)
        words[...] = np.ascontiguousarray(given).astype(desc.dtype.numpy).reshape(desc.shape).view(f"u{width}")
    return Tensor(raw, start, words.view(desc.dtype.numpy), desc, values is None)


def _closed(nbytes: int) -> npt.NDArray[np.uint8]:
    """At least that many bytes of NaNs, the last before a page that may not be touched."""
    pages = -(-max(nbytes, 1) // _PAGE)
    memory = mmap.mmap(-1, (pages + 1) * _PAGE)
    raw = np.frombuffer(memory, dtype=np.uint8)
    closed = ctypes.c_void_p(raw.ctypes.data + pages * _PAGE)
    if _libc.mprotect(closed, ctypes.c_size_t(_PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    raw[: pages * _PAGE] = NAN
    return raw[: pages * _PAGE]


def scratch_of(nbytes: int) -> tuple[npt.NDArray[np.uint8], int]:
    """A workspace full of NaNs with a margin behind it, and where in it the workspace begins."""
    scratch = np.full(nbytes + 64 + MARGIN, CANARY, dtype=np.uint8)
    first = -scratch.ctypes.data % 64
    scratch[first : first + nbytes] = NAN
    return scratch, first
