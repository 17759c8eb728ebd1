"""Convolutions on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright_kit.commands.parameters import argument, flag, option
from tilewright_kit.commands.problem_command import Example, ProblemCommand
from tilewright_kit.commands.steps import ACTIVATION, BINARY, CLAMP, SLOPE, SPLIT_K

if TYPE_CHECKING:
    from tilewright_grouped_conv.commands.cases import ConvCase
    from tilewright_kit.commands.cases import CaseFamily

__all__ = ["COMMAND", "LAYERS"]

_DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
_SWEPT_DIRECTIONS = ", ".join((*_DIRECTIONS, "transposed"))
_RULE_SET_FLAGS = ("--rule-set", "-r")
_RULE_SETS = ("default", "full", "full-tests", "profiler", "tests", "tiny")

LAYERS: tuple[tuple[str, Mapping[str, Any], tuple[tuple[str, str], ...]], ...] = (
    (
        "ResNet 3x3",
        {"n": 2, "c": 64, "k": 64, "size": "56x56", "filter": "3", "padding": "1"},
        (*((dtype, way) for dtype in ("fp32", "bf16") for way in _DIRECTIONS), ("fp16", "fwd"), ("int8", "fwd")),
    ),
    ("ResNet 1x1", {"n": 2, "c": 256, "k": 64, "size": "56x56", "filter": "1"}, (("fp32", "fwd"), ("bf16", "fwd"))),
    (
        "ResNet 3x3 NCHW",
        {"n": 2, "c": 64, "k": 64, "size": "56x56", "filter": "3", "padding": "1", "layout": "channels_first"},
        (("fp32", "fwd"),),
    ),
    (
        "ResNeXt 32 groups",
        {"n": 2, "c": 128, "k": 128, "size": "56x56", "filter": "3", "padding": "1", "groups": 32},
        tuple(("fp32", way) for way in _DIRECTIONS),
    ),
    (
        "MobileNet depthwise",
        {"n": 2, "c": 96, "k": 96, "size": "56x56", "filter": "3", "padding": "1", "groups": 96},
        tuple(("fp32", way) for way in _DIRECTIONS),
    ),
    (
        "3D 3x3x3",
        {"n": 1, "c": 32, "k": 32, "size": "8x28x28", "filter": "3", "padding": "1"},
        tuple(("fp32", way) for way in _DIRECTIONS),
    ),
)
"""Layers of networks that the demonstration shows: name, geometry, element types and directions."""


class ConvCommand(ProblemCommand):
    name = "conv"
    rank = 1
    noun = "a convolution"
    examples: Mapping[str, Sequence[str]] = {
        "run": (
            "1 64 64 56x56 3x3 --padding 1 --validate",
            "8 128 128 28x28 3x3 --padding 1 --groups 32 --dtype bf16 --direction bwd_weight",
            "1 96 96 112x112 3x3 --stride 2 --padding 1 --groups 96    depthwise",
            "1 16 32 8x28x28 3 --padding 1 --activation Relu --bias    three dimensions",
            "1 64 64 56x56 3x3 --layout channels_first --json",
            "1 64 32 28x28 4x4 --stride 2 --padding 1 --transposed --bias --validate",
            "2 64 64 28x28 3x3 --padding 1 --d 1 --scale channel --clamp 0:6 --validate",
            "32 64 64 56x56 3x3 --padding 1 --dtype fp16 --device cuda:0",
        ),
        "explain": (
            "1 64 64 56x56 3x3 --padding 1",
            "32 256 256 14x14 3x3 --padding 1 --direction bwd_weight --dtype bf16 --json",
        ),
        "bench": (
            "--shapes resnet50 --dtype fp32,bf16 --batch 8 --peer torch",
            "--shapes performance --direction fwd,bwd_data --dtype fp16 --device cuda:0 --record",
            "--shapes 32x64x64x56x56:3s1p1,32x96x96x56x56:3p1g96 --configs all --seconds 60",
            "--shapes layers.csv -o layers.parquet",
            "--shapes 1x64x32x28x28:4s2p1 --direction transposed --bias",
        ),
    }
    problem = (
        argument("n", int, "Images.", "N"),
        argument("c", int, "Channels of x, of all groups.", "C"),
        argument("k", int, "Channels of y, of all groups.", "K"),
        argument("size", str, "Spatial sizes of x, one to three: 56x56.", "HxW"),
        argument("filter", str, "Sizes of the filter: 3x3, or 3 for all axes.", "RxS"),
        option("stride", "1", "Steps: 2, or 2x1."),
        option("padding", "0", "Zeros around x: 1, 1x1, or before and behind: 0x0-1x1."),
        option("dilation", "1", "Distance of the filter's taps: 1, or 2x2."),
        option("groups", 1, "Groups; as many as channels: depthwise."),
        option("direction", "fwd", "fwd, or a gradient: bwd_data (of x), bwd_weight (of w).", words=_DIRECTIONS),
        option("dtype", "fp32", "Element type: fp32, fp16, bf16, fp8, bf8, int8, mixed (x fp8, w bf8)."),
        option("layout", "channels_last", "Layout of all tensors: channels_last or channels_first."),
    )
    steps = (
        option("out_dtype", "", "Element type of the result. Default: the operation's.", "--out-dtype"),
        flag("bias", "Add a bias for each output channel.", "--bias"),
        ACTIVATION,
        flag("accumulate", "Add a gradient to an older one.", "--accumulate"),
        option("d", 0, "Tensors of the result's shape that are brought in.", "--d", least=0),
        BINARY,
        option("scale", "", "Factors: one, or one for each channel.", words=("tensor", "channel"), strict=True),
        option("alpha", "", "Factor of the sums.", metavar="NUMBER"),
        CLAMP,
        SLOPE,
        SPLIT_K,
        flag(
            "transposed",
            "A transposed convolution: C in, K out, the sizes those of its input.",
            "--transposed",
            swept=False,  # a direction there
        ),
    )
    columns = (
        option(
            "direction",
            "fwd",
            "Directions of rows that name none, comma-separated: fwd, bwd_data, bwd_weight, transposed.",
        ),
        option("dtype", "", "Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
        option(
            "layout",
            "channels_last",
            "Layouts of rows that name none, comma-separated: channels_last, channels_first.",
        ),
    )
    replaced: Mapping[str, str] = {"batch": "n"}
    replaced_help = "Images of every problem; 0: as its row says."
    shapes = (
        "Comma-separated: files (CSV or JSON lines with n, c, k, size, filter and more), built-in lists (tiny, "
        "resnet50, resnext50, mobilenet_v2, conv3d, performance), shapes such as 32x64x64x56x56:3s1p1d1g1 (images, "
        "channels in and out, sizes; filter, stride, padding, dilation, groups), or - for standard input."
    )
    generated = (
        option("rule_set", "", f"Kernels to choose from: {', '.join(_RULE_SETS)}.", *_RULE_SET_FLAGS, words=_RULE_SETS),
        option("ndim", None, "Spatial axes: 1, 2 or 3.", "--ndim", "-n", kind=int),
        option("tile_m", None, "Only tiles of so many rows.", kind=int),
        option("tile_n", None, "Only tiles of so many columns.", kind=int),
        option("tile_k", None, "Only tiles of that depth.", kind=int),
        option("warp_m", None, "Only kernels with so many waves along M.", kind=int),
        option("warp_n", None, "Likewise along N.", kind=int),
        option("warp_k", None, "Likewise along K.", kind=int),
        option("warp_tile_m", None, "Only matrix instructions of so many rows.", kind=int),
        option("warp_tile_n", None, "Only matrix instructions of so many columns.", kind=int),
        option("warp_tile_k", None, "Only matrix instructions of that depth.", kind=int),
        option("pipeline", "", "Only this pipeline."),
        option("scheduler", "", "Only this scheduler: intrawave or interwave."),
        option("epilogue", "", "Only this epilogue: default or cshuffle."),
        option("pad_m", None, "Only kernels that take M that their tile does not divide, or that do not.", kind=bool),
        option("pad_n", None, "Likewise N.", kind=bool),
        option("pad_k", None, "Likewise K.", kind=bool),
        option("vector_a", None, "Only accesses to A of so many elements.", kind=int),
        option("vector_b", None, "Likewise to B.", kind=int),
        option("vector_c", None, "Likewise to C.", kind=int),
        option("num_wave_groups", None, "Only this number of wave groups.", "--num-wave-groups", kind=int),
        option(
            "num_groups_to_merge", None, "Only kernels that merge so many groups.", "--num-groups-to-merge", kind=int
        ),
        option(
            "double_smem_buffer",
            None,
            "Only kernels with, or without, two buffers in shared memory.",
            "--double-smem-buffer/--single-smem-buffer",
            kind=bool,
        ),
        option("split_image", None, "Only kernels that split large images, or do not.", kind=bool),
        option("two_stage", None, "Only kernels with, or without, a second stage that converts sums.", kind=bool),
        option("explicit_gemm", None, "Only pointwise kernels that read the image as a matrix, or others.", kind=bool),
        option(
            "streamk_enabled",
            None,
            "Only kernels with, or without, Stream-K.",
            "--streamk-enabled/--streamk-disabled",
            kind=bool,
        ),
        option(
            "streamk_reduction_strategy", "", "Only this way to add up: tree or linear.", "--streamk-reduction-strategy"
        ),
        option("streamk_persistent", None, "Only persistent Stream-K kernels, or others.", kind=bool),
    )

    def family(self) -> CaseFamily:
        from tilewright_grouped_conv.commands.family import CONV

        return CONV

    def case(self, given: Mapping[str, Any]) -> ConvCase:
        from tilewright_grouped_conv.commands.cases import ConvCase

        fields = dict(given)
        transposed = fields.pop("transposed", False)
        fields |= {name: "yes" if fields[name] else "" for name in ("bias", "accumulate") if name in fields}
        case = ConvCase(**fields).written("the command line")
        case = case.transposed("the command line") if transposed else case
        return case.fitting("the command line")

    def describe(self, case: ConvCase) -> Mapping[str, Any]:
        return {
            "N": case.n, "C": case.c, "K": case.k, "size": case.size, "filter": case.filter, "stride": case.stride,
            "padding": case.padding, "dilation": case.dilation, "groups": case.groups, "direction": case.direction,
            "dtype": case.dtype, "layout": case.layout,
        }  # fmt: skip

    def screen(self, case: ConvCase) -> None:
        """A gradient of what cannot be computed is rejected in the terms of the convolution itself."""
        if case.direction != "fwd":
            from tilewright_grouped_conv.problem.parse import parse_conv
            from tilewright_grouped_conv.vocabulary import Direction

            parse_conv(
                replace(case, direction="fwd", accumulate="", dtype="fp32", out_dtype="").request(), Direction.FORWARD
            )

    def demonstrated(self, size: int) -> Sequence[Example]:  # noqa: ARG002
        return [
            Example(f"{name} {dtype} {way}", self.case({**geometry, "dtype": dtype, "direction": way}))
            for name, geometry, shown in LAYERS
            for dtype, way in shown
        ]

    def numpy_call(self, case: ConvCase, inputs: Mapping[str, Any]) -> Callable[[], object]:
        from tilewright_grouped_conv.commands.numpy_peer import numpy_conv

        return numpy_conv(case, inputs)

    def generate_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = super().generate_options(given)
        if "streamk_reduction_strategy" in found:
            found["streamk_reduction_strategy"] = found["streamk_reduction_strategy"].lower()
        return found


COMMAND = ConvCommand()
