"""Runs plans of attention without a server: the system's compiler, ctypes, and a team made of Python threads.

Inputs end at a page that nobody may touch, so a kernel that reads outside them stops the process; outputs and what lies
around them are poisoned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from closed_memory import CANARY, Tensor, scratch_of, stored
from cpu_kernels import Array, CpuKernels

from tilewright_arch import ArchSpec
from tilewright_fmha.codegen import generate
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan
from tilewright_kit.contract.problem import Role

__all__ = ["FmhaRunner", "outputs_of"]

IN_PLACE = {"k_past": "k_cache", "v_past": "v_cache", "seqlens_k": "seqlens_out"}


class FmhaRunner:
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        self._kernels = CpuKernels(arch, command, folder, generate)
        self.workspace = self._kernels.workspace

    def prepare(self, plans: Sequence[ExecutionPlan]) -> None:
        """Build all kernels of several plans side by side."""
        self._kernels.build(config for plan in plans for config in plan.kernels)

    def run(
        self, plan: ExecutionPlan, inputs: Mapping[str, Array], team: int | None = None, in_place: bool = False
    ) -> dict[str, Tensor]:
        """Execute all stages; returns every tensor's memory. ``in_place``: a cache is appended to where it lies."""
        memory = {
            item.name: stored(item.desc, inputs[item.name] if item.role is Role.INPUT else None)
            for item in plan.operands
        }
        addresses = {name: item.address for name, item in memory.items()}
        for old, new in IN_PLACE.items() if in_place else ():
            if new in memory:
                memory[new].view[...] = memory[old].view
                addresses[old] = addresses[new]
        scratch, first = scratch_of(plan.workspace_bytes)
        addresses[WORKSPACE] = scratch.ctypes.data + first
        counters = np.zeros(max(plan.counter_bytes, 8) // 8 + 8, np.int64)
        addresses[COUNTERS] = counters.ctypes.data
        for stage in plan.stages:
            self._kernels.launch(stage, addresses, team)
        assert np.all(scratch[first + plan.workspace_bytes :] == CANARY), "the workspace was overrun"
        assert not counters.any(), "counters were not left zero"
        for name, item in memory.items():
            assert not item.overrun(), f"{name} was overrun"
        return memory


def outputs_of(plan: ExecutionPlan, memory: Mapping[str, Tensor]) -> dict[str, Array]:
    return {item.name: np.array(memory[item.name].view) for item in plan.operands if item.role is Role.OUTPUT}
