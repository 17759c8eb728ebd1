"""Runs plans of convolutions without a server: the system's compiler, ctypes, and a team made of Python threads.

Inputs end at a page that nobody may touch, so a kernel that reads outside them stops the process; outputs and what lies
around them are poisoned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from closed_memory import CANARY, NAN, Tensor, scratch_of, stored
from cpu_kernels import INCLUDE, Array, CpuKernels, compiler, draw

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.strided_copy.config import TransformConfig, generate_transform
from tilewright_kit.contract.plan import WORKSPACE, ExecutionPlan
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.contract.source import SourceUnit

__all__ = ["INCLUDE", "NAN", "Array", "ConvRunner", "Tensor", "compiler", "draw", "stored"]


class ConvRunner:
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path, options: Sequence[str] = ("-Og",)) -> None:
        self._kernels = CpuKernels(arch, command, folder, _generate, options)
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
        scratch, first = scratch_of(plan.workspace_bytes)
        addresses[WORKSPACE] = scratch.ctypes.data + first
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
