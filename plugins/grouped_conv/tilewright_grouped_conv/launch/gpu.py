"""The launches of convolution kernels on a GPU: parameters, grid, workspace.

The kernel's parameter is ``ConvParams`` of ``tilewright/gpu/conv/params.hpp``, field for field; a test compares
the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig, Triple
from tilewright_grouped_conv.launch.direct import loop_shared_bytes, loop_slices, loop_threads, loop_workgroups
from tilewright_grouped_conv.launch.image_ranges import image_ranges
from tilewright_grouped_conv.launch.kernel_args import operand_rows, problem_row
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import (
    COUNTERS,
    I64,
    WORKSPACE,
    Arg,
    Geometry,
    Pointer,
    Stage,
    Struct,
    Table,
    WorkspaceLayout,
)
from tilewright_kit.tiles.footprint.cpu import slices
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, threads_of
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["CONVERT_THREADS", "Launch", "convert_lanes", "gpu_stages", "product_shared_bytes", "steps_of", "tiles_of"]

_PARTIAL_BYTES = 4
_COUNTER_BYTES = 4
CONVERT_THREADS = 256
"""``kConvertThreads`` of ``tilewright/gpu/conv/convert.hpp``."""
_CONVERT_LANES = ((64, 16), (16, 8), (8, 4))
MOST_TASKS = 64
"""Products of one launch; more phases take several."""


def gpu_stages(
    problem: ConvProblem,
    config: ConvConfig,
    device: DeviceInfo,
    layout: WorkspaceLayout,
    acc: Pointer,
    kind: type[Launch] | None = None,
) -> tuple[list[Stage], int]:
    """The stages of a convolution, whose launches are of this ``kind`` (``Launch``, if None), and the bytes of its
    counters.
    """
    make = kind or Launch
    stages: list[Stage] = []
    counters = nbytes = 0
    launches: list[Launch] = []
    parts = list(image_ranges(problem, config, device.arch, acc))
    summed = problem.direction is Direction.BACKWARD_WEIGHT and len(parts) > 1
    for part, moved in parts:
        phases = [phase for phase in part.phases(config.channels_first) if phase.m and phase.n and phase.batch]
        some = [phases[first : first + MOST_TASKS] for first in range(0, len(phases), MOST_TASKS)]
        # Of the gradient of the weights all parts together have the slices that the kernel is made for.
        own = config.replace(split_k=max(config.split_k // len(parts), 1)) if summed else config
        launches.extend(make(part, config, items, device, moved, own.split_k) for items in some)
    for launch in launches:
        nbytes = nbytes + launch.workspace if summed else max(nbytes, launch.workspace)
        counters = max(counters, launch.counters)
    # Launches follow one another, so they share what they leave behind; but slices of parts are added at the end.
    scratch = Pointer(WORKSPACE, layout.reserve(nbytes)) if nbytes else Pointer()
    if not summed:
        for launch in launches:
            stages += launch.stages(scratch)
        return stages, counters
    offset = 0
    for launch in launches:
        stages.append(launch.main(Pointer(WORKSPACE, scratch.offset + offset)))
        offset += launch.workspace
    stages.append(launches[-1].convert(scratch, sum(launch.split for launch in launches), nbytes))
    return stages, counters


class Launch:
    """One launch of the kernel (and, with two stages, of what adds its slices)."""

    def __init__(
        self,
        problem: ConvProblem,
        config: ConvConfig,
        phases: list[Phase],
        device: DeviceInfo,
        acc: Pointer,
        slices: int = 0,
    ) -> None:
        """``slices``: at most so many; 0: as the configuration has them."""
        self.problem, self.config, self.phases, self.device, self.acc = problem, config, phases, device, acc
        self.arch = device.arch
        self.tiles = sum(self.workgroups(phase) for phase in phases)
        cut = config.replace(split_k=slices) if slices else config
        self.split = max((_slices(phase, cut) for phase in phases), default=1)
        # Without a product the gradient of the weights always has its sums added by a second kernel.
        self.converts = config.direction is Direction.BACKWARD_WEIGHT and (config.two_stage or not config.is_matrix)
        area = config.tile[0] * config.tile[1] * _PARTIAL_BYTES
        self.workspace = self.counters = 0
        if self.converts:
            self.workspace = sum(phase.batch * phase.m * phase.n for phase in phases) * self.split * _PARTIAL_BYTES
        elif config.split_k > 1 and config.is_matrix:
            self.workspace, self.counters = self.tiles * self.split * area, self.tiles * _COUNTER_BYTES

    def workgroups(self, phase: Phase) -> int:
        """Workgroups of a phase, for one slice."""
        if self.config.is_matrix:
            return tiles_of(phase, self.config)
        return loop_workgroups(phase, self.config, self.problem.geometry.n, self.arch)

    def grid(self) -> Triple:
        """Workgroups of all phases and slices."""
        return self.tiles * self.split, 1, 1

    def shared_bytes(self) -> int:
        """Shared memory of a workgroup."""
        if self.config.is_matrix:
            return product_shared_bytes(self.config, self.arch)
        return max(loop_shared_bytes(phase, self.config, self.arch) for phase in self.phases)

    def copies(self, phase: Phase) -> tuple[Struct, ...]:  # noqa: ARG002
        """The head of a phase's ``ConvTask``, which a copy engine needs; none without one."""
        return ()

    def stages(self, scratch: Pointer) -> Iterator[Stage]:
        yield self.main(scratch)
        if self.converts:
            yield self.convert(scratch, self.split, self.workspace)

    def main(self, scratch: Pointer) -> Stage:
        config = self.config
        args = self._args(scratch, self.split, self.workspace)
        threads = threads_of(config, self.arch) if config.is_matrix else loop_threads(config, self.arch)
        geometry = Geometry(grid=self.grid(), block=(threads, 1, 1), shared_bytes=self.shared_bytes())
        return Stage("main", config, "main", args, geometry)

    def convert(self, scratch: Pointer, split: int, workspace: int) -> Stage:
        """The sum of so many slices, of so many bytes."""
        config, arch = self.config, self.arch
        elements = sum(phase.batch * phase.m * phase.n for phase in self.phases)
        lanes = convert_lanes(config, arch)
        grid = (max(-(-elements * lanes // CONVERT_THREADS), 1), 1, 1)
        shared = CONVERT_THREADS * _PARTIAL_BYTES if lanes > 1 else 0
        geometry = Geometry(
            grid=grid,
            block=(CONVERT_THREADS, 1, 1),
            shared_bytes=shared,
            dependent=arch.bulk_copy is not None,  # where kernels wait for the launch before theirs by themselves
        )
        return Stage("convert", config, "convert", self._args(scratch, split, workspace), geometry)

    def _args(self, scratch: Pointer, split: int, workspace: int) -> Struct:
        tasks = tuple(self._tasks())
        grouped = self.config.mapped_rows and self.config.direction is Direction.BACKWARD_DATA
        head: tuple[Arg, ...] = (
            Table(tasks) if grouped else Pointer(),
            I64(len(tasks)),
            I64(self.tiles),
            scratch if workspace else Pointer(),
            Pointer(COUNTERS) if self.counters else Pointer(),
            I64(split),
            I64(workspace),
            I64(0),
        )
        return Struct(head if grouped else (*head, *tasks))

    def _tasks(self) -> Iterator[Struct]:
        """``ConvTask``: what a copy engine needs, the problem, its first tile, its D operands."""
        first = 0
        for phase in self.phases:
            loops = not self.config.is_matrix
            row = problem_row(self.problem, self.config, phase, Pointer(), self.acc, image_first=loops)
            yield Struct((*self.copies(phase), row, I64(first), *operand_rows(self.problem, self.config)))
            first += self.workgroups(phase)


def product_shared_bytes(config: ConvConfig, arch: ArchSpec) -> int:
    """Shared memory of a product's workgroup: on AMD GPUs, where it decides how many workgroups a unit holds, the first
    of two stages gets no room in which to put results in order: it stores its sums as they are (``PartialConfig`` of
    ``gpu/conv/implicit_gemm.hpp``).
    """
    plain = arch.kind == "hip" and config.two_stage
    return shared_bytes(config.replace(epilogue=Epilogue.DEFAULT) if plain else config, arch)


def convert_lanes(config: ConvConfig, arch: ArchSpec) -> int:
    """Threads that share the slices of an element: ``convert_lanes`` of ``conv_convert.hpp``."""
    if arch.kind == "hip":
        return 1
    return next((lanes for slices, lanes in _CONVERT_LANES if config.split_k >= slices), 1)


def _slices(phase: Phase, config: ConvConfig) -> int:
    return steps_of(phase, config) if config.is_matrix else loop_slices(phase, config)


def tiles_of(phase: Phase, config: ConvConfig) -> int:
    """Output tiles of a product, all its items together."""
    return -(-phase.m // config.tile[0]) * -(-phase.n // config.tile[1]) * phase.batch


def steps_of(phase: Phase, config: ConvConfig) -> int:
    """Slices of a product's reduction that are not empty, at most ``split_k``."""
    if config.direction is Direction.BACKWARD_DATA and config.is_matrix and not config.explicit_gemm:
        # Steps keep within a tap, and slices are whole steps.
        steps = phase.taps * -(-(phase.k // max(phase.taps, 1)) // config.tile[2])
        return slices(steps, config.split_k, 1)
    return slices(phase.k, config.split_k, config.tile[2])
