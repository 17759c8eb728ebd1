"""Runs plans of convolutions without a server: the system's compiler, ctypes, and a team made of Python threads.

Inputs end at a page that nobody may touch, so a kernel that reads outside them stops the process; outputs and what lies
around them are poisoned.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cpu_kernels import INCLUDE, Array, CpuKernels, compiler, draw

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.transform_config import TransformConfig, generate_transform
from tilewright_kit.compare import poison
from tilewright_kit.plan import WORKSPACE, ExecutionPlan
from tilewright_kit.problem import Operand, Role
from tilewright_kit.source import SourceUnit
from tilewright_kit.tensor import TensorDesc

__all__ = ["INCLUDE", "NAN", "Array", "ConvRunner", "Tensor", "compiler", "draw", "stored"]

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
        """Whether bytes around the tensor, or between its elements, were written."""
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


class ConvRunner:
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        self._kernels = CpuKernels(arch, command, folder, _generate)
        self.workspace = self._kernels.workspace

    def prepare(self, plans: Sequence[ExecutionPlan]) -> None:
        """Build all kernels of several plans side by side."""
        self._kernels.build(config for plan in plans for config in plan.kernels)

    def run(
        self, plan: ExecutionPlan, inputs: Mapping[str, Array], team: int | None = None, in_place: bool = False
    ) -> dict[str, Tensor]:
        """Execute all stages; returns every tensor's memory. ``in_place``: what is accumulated is the output itself."""
        memory = {item.name: stored(item.desc, _values(item, inputs)) for item in plan.operands}
        addresses = {name: item.address for name, item in memory.items()}
        if in_place:
            output = next(item for item in plan.operands if item.role is Role.OUTPUT)
            memory[output.name].view[...] = memory["acc"].view
            addresses["acc"] = addresses[output.name]
        scratch = np.full(plan.workspace_bytes + 64 + MARGIN, CANARY, dtype=np.uint8)
        start = -(-scratch.ctypes.data // 64) * 64
        first = start - scratch.ctypes.data
        scratch[first : first + plan.workspace_bytes] = NAN
        addresses[WORKSPACE] = start
        for stage in plan.stages:
            self._kernels.launch(stage, addresses, team)
        assert np.all(scratch[first + plan.workspace_bytes :] == CANARY), "the workspace was overrun"
        for name, item in memory.items():
            assert not item.overrun(), f"{name} was overrun"
        return memory


def _generate(config: Any, arch: ArchSpec) -> SourceUnit:
    return generate_transform(config, arch) if isinstance(config, TransformConfig) else generate(config, arch)


def _values(item: Operand, inputs: Mapping[str, Array]) -> Array | None:
    return inputs[item.name] if item.role is Role.INPUT else None
