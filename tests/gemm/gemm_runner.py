"""Runs execution plans without a server: the system's compiler, ctypes, and a team made of Python threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from cpu_kernels import INCLUDE, Array, CpuKernels, compiler, draw

from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import generate
from tilewright_kit.contract.plan import WORKSPACE, ExecutionPlan
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.numerics.compare import poison
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["INCLUDE", "Array", "Memory", "Runner", "compiler", "draw"]

MARGIN = 64
"""Bytes behind every tensor that nobody may write."""
CANARY = 0xA5


@dataclass
class Memory:
    """Storage of one tensor: its bytes with a margin behind them, and the tensor as NumPy sees it."""

    raw: npt.NDArray[np.uint8]
    view: Array
    size: int

    @classmethod
    def of(cls, desc: TensorDesc, values: Array | None = None) -> Memory:
        """Memory laid out as ``desc`` says, holding ``values``, or poison."""
        raw = np.full(desc.nbytes + MARGIN, CANARY, dtype=np.uint8)
        if desc.packing:
            raw[: desc.nbytes] = 0xFF if values is None else values
            return cls(raw, raw[: desc.nbytes], desc.nbytes)
        width = desc.dtype.bytes
        whole = raw[: desc.nbytes].view(f"u{width}")
        strides = [stride * width for stride in desc.strides]
        words = np.lib.stride_tricks.as_strided(whole, desc.shape, strides)
        if values is None:
            values = poison(desc.dtype, desc.shape)
        if desc.nbytes:
            words[...] = np.ascontiguousarray(values).astype(desc.dtype.numpy).reshape(desc.shape).view(f"u{width}")
        return cls(
            raw, words.view(desc.dtype.numpy) if desc.nbytes else np.zeros(desc.shape, desc.dtype.numpy), desc.nbytes
        )

    @property
    def address(self) -> int:
        return self.raw.ctypes.data

    def overrun(self) -> bool:
        return bool(np.any(self.raw[self.size :] != CANARY))


class Runner:
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        self._kernels = CpuKernels(arch, command, folder, generate)
        self.prepare = self._kernels.build
        self.kernel = self._kernels.kernel

    def run(self, plan: ExecutionPlan, inputs: Mapping[str, Array], team: int | None = None) -> dict[str, Memory]:
        """Execute all stages; returns every tensor's memory. Packed inputs are given as ``uint8`` bytes."""
        memory = {item.name: Memory.of(item.desc, _values(item, inputs)) for item in plan.operands}
        scratch = np.full(plan.workspace_bytes + 64 + MARGIN, CANARY, dtype=np.uint8)
        start = -(-scratch.ctypes.data // 64) * 64
        addresses = {name: item.address for name, item in memory.items()} | {WORKSPACE: start}
        for stage in plan.stages:
            self._kernels.launch(stage, addresses, team)
        end = start - scratch.ctypes.data + plan.workspace_bytes
        assert np.all(scratch[end:] == CANARY), "the workspace was overrun"
        for name, item in memory.items():
            assert not item.overrun(), f"{name} was overrun"
        return memory

    def workspace(self, plan: ExecutionPlan) -> int:
        """What the first kernel itself says it needs."""
        return self._kernels.workspace(plan.stages[0], plan)


def _values(item: Operand, inputs: Mapping[str, Array]) -> Array | None:
    return inputs[item.name] if item.role is Role.INPUT else None
