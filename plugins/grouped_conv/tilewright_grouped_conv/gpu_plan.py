"""The launches of convolution kernels on a GPU: parameters, grid, workspace.

The kernel's parameter is ``ConvParams`` of ``tilewright/gpu/conv_params.hpp``, field for field; a test compares
the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_grouped_conv.config import ConvConfig
from tilewright_grouped_conv.phases import Phase
from tilewright_grouped_conv.problem import ConvProblem
from tilewright_grouped_conv.rows import operand_rows, problem_row
from tilewright_kit.device import DeviceInfo
from tilewright_kit.plan import I64, Pointer, Stage, Struct, WorkspaceLayout

__all__ = ["gpu_stages"]


def gpu_stages(
    problem: ConvProblem, config: ConvConfig, device: DeviceInfo, layout: WorkspaceLayout, acc: Pointer
) -> tuple[list[Stage], int]:
    """The stages of a launch, and the bytes of its counters."""
    raise NotImplementedError


def _tasks(problem: ConvProblem, phases: tuple[Phase, ...], config: ConvConfig, acc: Pointer) -> Iterator[Struct]:
    """``ConvTask``: the problem, its first tile, its D operands."""
    first = 0
    for phase in phases:
        row = problem_row(problem, config, phase, Pointer(), acc)
        yield Struct((row, I64(first), *operand_rows(problem, config)))
