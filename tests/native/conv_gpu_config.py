"""Configurations of the GPU kernels of convolutions, as a generated source unit states them, and what launches need."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpu_config import GpuConfig

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class ConvGpuConfig(GpuConfig):
    """One kernel; ``kind`` depthwise and direct have no product (``tile`` is idle)."""

    direction: str = "forward"
    kind: str = "implicit"
    ndim: int = 2
    accumulate: bool = False
    linear_rows: bool = True
    two_stage: bool = False
    vectors: Triple = (8, 8, 8)
    groups_merged: int = 1
    blocks_per_unit: int = 0
    channel_tile: int = 0
    pixel_tile: Triple = (0, 0, 0)
    filter: Triple = (0, 0, 0)
    stride: Triple = (0, 0, 0)
    dilation: Triple = (0, 0, 0)
    channels_first: bool = False

    @property
    def is_matrix(self) -> bool:
        return self.kind in ("implicit", "pointwise")

    @property
    def header(self) -> str:
        weight = self.direction == "backward_weight"
        if weight and self.kind == "implicit" and self.wave_size == 64 and self.a in ("fp16", "bf16"):
            return "conv/shared_pixels.hpp"
        if self.is_matrix:
            return "conv/weight.hpp" if weight else "conv/implicit_gemm.hpp"
        return (
            "conv/direct/weight.hpp"
            if weight
            else "conv/depthwise/depthwise.hpp"
            if self.kind == "depthwise"
            else "conv/direct/conv.hpp"
        )

    @property
    def image_vector(self) -> int:
        """Elements of one access to the image."""
        return self.vectors[1] if self.direction == "backward_weight" else self.vectors[0]

    @property
    def converts(self) -> bool:
        """Whether a second kernel adds the slices."""
        return self.direction == "backward_weight" and (self.two_stage or not self.is_matrix)

    @property
    def convert_lanes(self) -> int:
        """Threads of that kernel that share the slices of an element."""
        if self.wave_size != 32 or not self.converts:
            return 1
        return next((lanes for slices, lanes in ((64, 16), (16, 8), (8, 4)) if self.split_k >= slices), 1)

    @property
    def shared_bytes(self) -> int:
        if not self.is_matrix:
            return 98304  # as much as any of these kernels asks for
        return super().shared_bytes

    @property
    def threads_across(self) -> int:
        """Without a product: threads that compute different channels (of the weights, or units) of the same pixels."""
        if self.channels_first:
            return 1
        vector = self.vectors[2] if self.kind == "direct" and self.direction != "backward_weight" else self.vectors[0]
        if self.kind == "direct" and self.direction == "backward_weight":
            return self.channel_tile // vector if self.channel_tile else 32
        return (self.channel_tile or 8 * vector) // vector

    @property
    def merged(self) -> bool:
        """Whether blocks of eight channels are multiplied by matrix instructions, whatever groups they are."""
        return not self.is_matrix and self.groups_merged > 1

    @property
    def merged_bytes(self) -> int:
        """Shared memory of a kernel of merged groups."""
        channels = self.channel_tile or 8 * self.team
        _, rows, run = self.pixels
        spans, backward = [], self.direction == "backward_data"
        for axis, size in ((1, rows), (2, run)):
            absent = axis < 3 - self.ndim
            taps, stride, dilation = (
                1 if absent else values[axis] for values in (self.filter, self.stride, self.dilation)
            )
            if backward:
                common = math.gcd(stride, dilation)
                taps, stride, dilation = -(-taps // (stride // common)), 1, dilation // common
            span = (size - 1) * stride + (taps - 1) * dilation + 1
            spans.append(span if axis == 1 else -(-span // stride) * stride)
        pixel = channels * 2 + 16
        image = spans[0] * spans[1] * pixel
        if self.direction == "backward_weight":
            handed = channels // 16 * max(4 // self.groups_merged, 1) * self.taps_hw * 8 * 32 * 4
            return max((self.pixels[0] + 1) * (image + rows * run * pixel), handed)
        return image * (2 if self.pixels[0] > 1 else 1) + self.staged_bytes(channels)

    def staged_bytes(self, channels: int) -> int:
        """Of it, the weights where lanes store their own channels: of groups of 16 channels and more, of backward data
        the most taps of a phase; of smaller groups forward alone.
        """
        small = self.groups_merged > 4
        if self.epilogue != "cshuffle" or (small and self.direction != "forward"):
            return 0
        taps = 1
        for axis in range(3 - self.ndim, 3):
            every = self.stride[axis] // math.gcd(self.stride[axis], self.dilation[axis])
            taps *= -(-self.filter[axis] // (every if self.direction == "backward_data" else 1))
        return channels * (taps * (64 // self.groups_merged) * 2 + (0 if small else 16))

    @property
    def taps_hw(self) -> int:
        """Taps that are compiled in."""
        return math.prod(self.filter[axis] for axis in range(3 - self.ndim, 3))

    @property
    def is_fixed(self) -> bool:
        """Without a product: whether the filter is compiled in."""
        axes = range(max(3 - self.ndim, 1), 3)
        return not self.grouped and all(self.filter[i] and self.stride[i] and self.dilation[i] for i in axes)

    @property
    def pixels(self) -> Triple:
        """Without a product: tiles of a thread, rows and places along a row of a tile."""
        repeats, rows, run = self.pixel_tile
        if self.merged:
            return repeats or 1, rows or 8, run or 8
        tall = self.is_fixed and self.kind == "depthwise" and self.direction != "backward_weight"
        tall = tall and (self.direction == "backward_data" or self.stride[1] in (0, 1))
        return repeats or 1, rows or (2 if tall else 1), run or 4

    def text(self, name: str) -> str:
        def flag(value: bool) -> str:
            return "true" if value else "false"

        def triple(values: Triple) -> str:
            return f"{{{', '.join(map(str, values))}}}"

        more = [
            f"static constexpr tw::Direction direction = tw::Direction::{self.direction};",
            f"static constexpr tw::ConvKind kind = tw::ConvKind::{self.kind};",
            f"static constexpr int ndim = {self.ndim}, groups_merged = {self.groups_merged};",
            f"static constexpr int blocks_per_unit = {self.blocks_per_unit};",
            f"static constexpr int vector_a = {self.vectors[0]}, vector_b = {self.vectors[1]};",
            f"static constexpr int vector_c = {self.vectors[2]}, channel_tile = {self.channel_tile};",
            f"static constexpr bool channels_first = {flag(self.channels_first)}, bias_rows = channels_first;",
            f"static constexpr bool accumulate = {flag(self.accumulate)}, linear_rows = {flag(self.linear_rows)};",
            f"static constexpr bool two_stage = {flag(self.two_stage)};",
            f"static constexpr int pixel_tile[3] = {triple(self.pixel_tile)}, filter[3] = {triple(self.filter)};",
            f"static constexpr int stride[3] = {triple(self.stride)}, dilation[3] = {triple(self.dilation)};",
        ]
        ends = f"TW_CONV_KERNEL({name}, Config_{name})\n"
        if self.converts:
            ends += f"TW_CONV_CONVERT({name}_convert, Config_{name})\n"
        before, after = super().text(name).split("\n};\nTW_GEMM_KERNEL", 1)
        return before + "\n  " + "\n  ".join(more) + "\n};\n" + ends + after.split("\n", 1)[1]

    def unit(self, name: str) -> str:
        return f'#include "tilewright/gpu/{self.header}"\n{self.text(name)}'
