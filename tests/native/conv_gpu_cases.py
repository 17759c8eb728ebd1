"""The convolutions that the tests of GPU kernels run: each kernel with some sizes, odd ones above all."""

from __future__ import annotations

from typing import Any

from conv_gpu_config import ConvGpuConfig
from conv_gpu_truth import Shape

Settings = list[dict[str, Any]]

SMALL = ConvGpuConfig(tile=(64, 32, 32), wave=(2, 1))
WIDE = ConvGpuConfig(tile=(32, 64, 64), wave=(1, 2), epilogue="default", pipeline="compv3")
DATA = {"direction": "backward_data", "b_col": False}
PHASES = {**DATA, "grouped": True, "linear_rows": False}
WEIGHT = {"direction": "backward_weight", "a_col": True, "b_col": False}
ONE = {"vectors": (1, 1, 1)}

PLAIN = Shape()
STRIDED = Shape(c=32, k=48, groups=2, stride=(1, 2, 1), dilation=(1, 1, 2))
LEFT = Shape(n=3, c=16, k=16, size=(1, 6, 11), filter=(1, 2, 5), begin=(0, 0, 3), end=(0, 2, 0))
SPARSE = Shape(n=2, c=16, k=8, size=(1, 10, 11), filter=(1, 1, 2), stride=(1, 3, 4), begin=(0, 0, 0), end=(0, 0, 1))
ODD = Shape(n=2, c=15, k=9, groups=3, stride=(1, 2, 3), dilation=(1, 2, 1), begin=(0, 2, 1), end=(0, 0, 2))
THREE = Shape(n=1, c=3, k=5, size=(1, 12, 9), filter=(1, 5, 3), begin=(0, 2, 1), end=(0, 1, 1))
DOT = Shape(n=5, c=8, k=24, size=(1, 3, 4), filter=(1, 3, 4), begin=(0, 0, 0), end=(0, 0, 0))
LINE = Shape(
    n=2, c=8, k=16, size=(1, 1, 40), filter=(1, 1, 7), stride=(1, 1, 2), begin=(0, 0, 3), end=(0, 0, 2), ndim=1
)
LONG = Shape(n=1, c=8, k=8, size=(1, 1, 50), filter=(1, 1, 35), begin=(0, 0, 17), end=(0, 0, 17), ndim=1)
TALL = Shape(n=1, c=8, k=8, size=(1, 24, 5), filter=(1, 18, 2), begin=(0, 9, 1), end=(0, 9, 0))
CUBE = Shape(
    n=1, c=16, k=16, groups=2, size=(5, 6, 7), filter=(3, 2, 3), stride=(2, 1, 2), dilation=(1, 2, 1), begin=(1, 1, 1),
    end=(1, 0, 1), ndim=3,
)  # fmt: skip
POINT = Shape(n=2, c=32, k=48, groups=2, size=(1, 5, 7), filter=(1, 1, 1), begin=(0, 0, 0), end=(0, 0, 0))
SOLID = Shape(n=1, c=128, k=64, size=(1, 12, 12))
DEEP = {"c": 72, "k": 72, "groups": 72}
FIXED = {"filter": (1, 3, 3), "stride": (1, 1, 1), "dilation": (1, 1, 1)}
FIXED2 = {"filter": (1, 3, 3), "stride": (1, 2, 2), "dilation": (1, 1, 1)}
DEPTH = ConvGpuConfig(kind="depthwise", wave=(2, 1))
SMALL_GROUPS = ConvGpuConfig(kind="direct", wave=(2, 1), vectors=(4, 4, 4))
MERGED = ConvGpuConfig(kind="direct", wave=(2, 1), epilogue="default")
FOURS = Shape(c=20, k=20, groups=5)
EIGHTS = Shape(c=24, k=24, groups=3, size=(1, 7, 10))
EIGHTS2 = Shape(c=24, k=24, groups=3, stride=(1, 2, 2), size=(1, 8, 13))
UNEVEN = Shape(c=12, k=15, groups=3, stride=(1, 3, 1), dilation=(1, 1, 2))
UNEVEN_ONE = Shape(c=15, k=12, groups=3, dilation=(1, 1, 2))
ODD_GROUPS = Shape(c=15, k=9, groups=3)
ODD_CUBE = Shape(
    n=1, c=6, k=9, groups=3, size=(5, 6, 7), filter=(3, 2, 3), stride=(2, 1, 2), dilation=(1, 2, 1), begin=(1, 1, 1),
    end=(1, 0, 1), ndim=3,
)  # fmt: skip


def shapes(*each: Shape, **more: Any) -> Settings:
    return [{"shape": shape, **more} for shape in each]


CASES: dict[str, tuple[ConvGpuConfig, Settings]] = {
    "forward": (SMALL, [*shapes(PLAIN, STRIDED, LEFT, DOT, SOLID), {"shape": STRIDED, "gap": 8, "alpha": 0.5}]),
    "forward_registers": (WIDE, shapes(PLAIN, STRIDED, SOLID, TALL)),
    "forward_elements": (SMALL.replace(**ONE), [*shapes(ODD, THREE, TALL), {"shape": ODD, "gap": 3}]),
    "forward_pairs": (
        SMALL.replace(vectors=(2, 2, 2)),
        shapes(Shape(c=10, k=6), Shape(c=12, k=14, groups=2, stride=(1, 3, 1))),
    ),
    "forward_fours": (SMALL.replace(vectors=(4, 8, 8)), shapes(PLAIN, Shape(c=8, k=16), STRIDED)),
    "forward_1d": (SMALL.replace(ndim=1, a="bf16", b="bf16", c="fp32"), shapes(LINE, LONG)),
    "forward_3d": (SMALL.replace(ndim=3), shapes(CUBE)),
    "forward_wide": (SMALL, shapes(TALL)),
    "forward_fp32": (
        ConvGpuConfig(a="fp32", b="fp32", c="fp32", tile=(64, 32, 16), wave=(2, 1), vectors=(4, 4, 4)),
        shapes(PLAIN, STRIDED),
    ),
    "forward_int8": (
        SMALL.replace(a="int8", b="int8", c="int32", tile=(64, 32, 64), vectors=(16, 16, 4)),
        shapes(PLAIN),
    ),
    "forward_int8_elements": (
        SMALL.replace(a="int8", b="int8", c="int32", tile=(64, 32, 64), vectors=(1, 1, 1)),
        shapes(ODD),
    ),
    "forward_fp8": (
        SMALL.replace(a="fp8", b="bf8", c="fp16", tile=(64, 32, 64), vectors=(16, 16, 8)),
        shapes(PLAIN),
    ),
    "forward_fused": (
        SMALL.replace(bias="fp32", unary="Relu", d=("fp16",), binary="Add"),
        [{"shape": STRIDED, "alpha": 0.25}],
    ),
    "forward_pointwise": (SMALL.replace(kind="pointwise"), [*shapes(POINT), {"shape": POINT, "gap": 8}]),
    "forward_split": (SMALL.replace(split_k=4), shapes(SOLID, STRIDED, split_k=3)),
    "data": (
        SMALL.replace(**DATA),
        [*shapes(PLAIN, LEFT, DOT, SOLID, Shape(n=1, c=8, k=40)), {"shape": POINT, "gap": 8}],
    ),
    "data_registers": (WIDE.replace(**DATA), shapes(PLAIN, SOLID)),
    "data_phases": (SMALL.replace(**PHASES), [*shapes(STRIDED, SPARSE, PLAIN), {"shape": STRIDED, "gap": 8}]),
    "data_elements": (SMALL.replace(**PHASES, **ONE), shapes(ODD, THREE)),
    "data_adds": (SMALL.replace(**PHASES, accumulate=True), [{"shape": STRIDED, "alpha": 0.5}]),
    "data_bias": (SMALL.replace(**DATA, bias="fp16", unary="Relu"), shapes(PLAIN)),
    "data_1d": (SMALL.replace(**PHASES, ndim=1), shapes(LINE, LONG)),
    "data_3d": (SMALL.replace(**PHASES, ndim=3), shapes(CUBE)),
    "data_pointwise": (SMALL.replace(**DATA, kind="pointwise"), shapes(POINT)),
    "data_split": (SMALL.replace(**DATA, split_k=4), shapes(SOLID, LEFT, split_k=4)),
    "data_fp32": (
        ConvGpuConfig(a="fp32", b="fp32", c="fp32", tile=(32, 64, 16), wave=(1, 2), vectors=(4, 4, 4), **PHASES),
        shapes(STRIDED),
    ),
    "weight": (SMALL.replace(**WEIGHT), [*shapes(PLAIN, STRIDED, LEFT, DOT), {"shape": STRIDED, "gap": 8}]),
    "weight_registers": (WIDE.replace(**WEIGHT), shapes(PLAIN, STRIDED)),
    "weight_elements": (SMALL.replace(**WEIGHT, **ONE), shapes(ODD, THREE)),
    "weight_split": (SMALL.replace(**WEIGHT, split_k=8), shapes(SOLID, STRIDED, split_k=5)),
    "weight_two_stages": (
        SMALL.replace(**WEIGHT, split_k=8, two_stage=True, accumulate=True, c="fp32"),
        [{"shape": STRIDED, "split_k": 5, "alpha": 0.5}, {"shape": SOLID, "split_k": 2}],
    ),
    "weight_adds": (SMALL.replace(**WEIGHT, accumulate=True), [{"shape": STRIDED, "alpha": 0.5}]),
    "weight_1d": (SMALL.replace(**WEIGHT, ndim=1), shapes(LINE, LONG)),
    "weight_3d": (SMALL.replace(**WEIGHT, ndim=3), shapes(CUBE)),
    "weight_pointwise": (SMALL.replace(**WEIGHT, kind="pointwise"), shapes(POINT)),
    "weight_fp32": (
        ConvGpuConfig(a="fp32", b="fp32", c="fp32", tile=(64, 32, 16), wave=(2, 1), vectors=(4, 4, 4), **WEIGHT),
        shapes(STRIDED),
    ),
    "depthwise": (DEPTH.replace(**FIXED), [*shapes(Shape(**DEEP)), {"shape": Shape(**DEEP), "gap": 8}]),
    "depthwise_stride": (DEPTH.replace(**FIXED2), shapes(Shape(**DEEP, stride=(1, 2, 2)))),
    "depthwise_any": (
        DEPTH.replace(vectors=(4, 4, 4)),
        shapes(Shape(**DEEP, dilation=(1, 2, 1), stride=(1, 1, 3)), gap=4),
    ),
    "depthwise_elements": (
        DEPTH.replace(vectors=(1, 1, 1), channel_tile=8),
        shapes(Shape(c=11, k=11, groups=11), gap=1),
    ),
    "depthwise_fused": (
        DEPTH.replace(**FIXED, bias="fp32", unary="Relu", d=("fp16",), binary="Add"),
        shapes(Shape(**DEEP)),
    ),
    "depthwise_3d": (
        DEPTH.replace(
            a="fp32",
            b="fp32",
            c="fp32",
            filter=(3, 3, 3),
            stride=(2, 1, 2),
            dilation=(1, 2, 1),
            ndim=3,
            vectors=(4, 4, 4),
            channel_tile=16,
            pixel_tile=(1, 1, 2),
        ),
        shapes(
            Shape(
                n=1,
                c=12,
                k=12,
                groups=12,
                ndim=3,
                size=(7, 8, 9),
                filter=(3, 3, 3),
                stride=(2, 1, 2),
                dilation=(1, 2, 1),
                begin=(1, 2, 1),
                end=(0, 1, 1),
            )
        ),
    ),
    "depthwise_data": (DEPTH.replace(direction="backward_data", **FIXED, accumulate=True), shapes(Shape(**DEEP))),
    "depthwise_data_any": (
        DEPTH.replace(direction="backward_data", channel_tile=16),
        shapes(Shape(**DEEP, dilation=(1, 2, 1))),
    ),
    "depthwise_data_phases": (
        DEPTH.replace(direction="backward_data", grouped=True, linear_rows=False),
        shapes(Shape(**DEEP, stride=(1, 2, 3), filter=(1, 2, 5))),
    ),
    "depthwise_weight": (DEPTH.replace(direction="backward_weight", **FIXED), shapes(Shape(**DEEP), split_k=3)),
    "depthwise_weight_stride": (
        DEPTH.replace(direction="backward_weight", **FIXED2, c="fp32", accumulate=True),
        [{"shape": Shape(**DEEP, stride=(1, 2, 2)), "split_k": 2, "alpha": 0.5}],
    ),
    "depthwise_weight_any": (
        DEPTH.replace(direction="backward_weight", vectors=(2, 2, 2)),
        shapes(Shape(**DEEP, dilation=(1, 2, 1), filter=(1, 2, 3)), split_k=2, gap=2),
    ),
    "depthwise_repeats": (
        DEPTH.replace(**FIXED, pixel_tile=(3, 1, 2), channel_tile=24, wave=(3, 1)),
        shapes(Shape(**DEEP)),
    ),
    "groups": (SMALL_GROUPS.replace(**FIXED), [*shapes(FOURS, EIGHTS), {"shape": EIGHTS, "gap": 8, "alpha": 0.5}]),
    "groups_stride": (SMALL_GROUPS.replace(**FIXED2, pixel_tile=(2, 2, 4)), shapes(EIGHTS2)),
    "groups_any": (SMALL_GROUPS.replace(vectors=(2, 2, 4)), shapes(UNEVEN, EIGHTS2)),
    "groups_elements": (SMALL_GROUPS.replace(vectors=(1, 1, 2), **FIXED), shapes(ODD_GROUPS, gap=1)),
    "groups_fused": (
        SMALL_GROUPS.replace(**FIXED, bias="fp16", unary="Relu", d=("fp16",), binary="Add"),
        shapes(EIGHTS),
    ),
    "groups_data": (
        SMALL_GROUPS.replace(direction="backward_data", **FIXED, accumulate=True),
        shapes(FOURS, EIGHTS),
    ),
    "groups_data_phases": (
        SMALL_GROUPS.replace(direction="backward_data", grouped=True, linear_rows=False),
        shapes(EIGHTS2, FOURS),
    ),
    "groups_data_any": (SMALL_GROUPS.replace(direction="backward_data", vectors=(2, 2, 2)), shapes(UNEVEN_ONE)),
    "groups_weight": (
        SMALL_GROUPS.replace(direction="backward_weight", **FIXED),
        shapes(FOURS, EIGHTS, split_k=3),
    ),
    "groups_weight_stride": (
        SMALL_GROUPS.replace(direction="backward_weight", **FIXED2, c="fp32", channel_tile=32, accumulate=True),
        [{"shape": EIGHTS2, "split_k": 2, "alpha": 0.5}],
    ),
    "groups_weight_any": (
        SMALL_GROUPS.replace(direction="backward_weight", vectors=(2, 2, 2)),
        shapes(UNEVEN, split_k=2),
    ),
    "groups_weight_3d": (
        SMALL_GROUPS.replace(direction="backward_weight", vectors=(2, 2, 2), ndim=3),
        shapes(ODD_CUBE, split_k=2),
    ),
    "merged_depthwise": (
        MERGED.replace(kind="depthwise", groups_merged=64, **FIXED),
        [*shapes(Shape(**DEEP)), {"shape": Shape(**DEEP), "gap": 8}],
    ),
    "merged_depthwise_data": (
        MERGED.replace(kind="depthwise", groups_merged=64, direction="backward_data", **FIXED, accumulate=True),
        shapes(Shape(**DEEP)),
    ),
    "merged_weight_many_slices": (
        MERGED.replace(groups_merged=16, direction="backward_weight", **FIXED, channel_tile=32, split_k=20),
        shapes(Shape(n=5, c=40, k=40, groups=10), split_k=17),
    ),
    "depthwise_weight_many_slices": (
        DEPTH.replace(**FIXED, direction="backward_weight", split_k=66),
        shapes(Shape(n=9, **DEEP), split_k=65),
    ),
    "merged_sixteens_weight": (
        MERGED.replace(
            groups_merged=4, direction="backward_weight", **FIXED2, wave=(4, 1), channel_tile=32, pixel_tile=(1, 4, 16)
        ),
        shapes(Shape(n=3, c=48, k=48, groups=3, stride=(1, 2, 2), size=(1, 9, 45)), split_k=2),
    ),
    "merged_thirty_twos_weight": (
        MERGED.replace(
            groups_merged=2,
            direction="backward_weight",
            **FIXED,
            wave=(4, 1),
            channel_tile=32,
            a="bf16",
            b="bf16",
            c="bf16",
        ),
        shapes(Shape(n=3, c=64, k=64, groups=2, size=(1, 7, 9)), split_k=2),
    ),
    "merged_weight_ahead": (  # three tiles on their way, of slices of five, five and one
        MERGED.replace(
            groups_merged=2, direction="backward_weight", **FIXED, wave=(4, 1), channel_tile=32, pixel_tile=(3, 8, 8)
        ),
        shapes(Shape(n=11, c=64, k=64, groups=2, size=(1, 7, 7)), split_k=3),
    ),
    "merged_depthwise_weight": (
        MERGED.replace(kind="depthwise", groups_merged=64, direction="backward_weight", **FIXED, channel_tile=32),
        shapes(Shape(**DEEP), split_k=3),
    ),
    "merged_fours": (
        MERGED.replace(
            groups_merged=16,
            filter=(1, 2, 5),
            stride=(1, 2, 1),
            dilation=(1, 1, 2),
            bias="fp16",
            unary="Relu",
            d=("fp16",),
            binary="Add",
            pixel_tile=(2, 4, 16),
        ),
        shapes(
            Shape(
                n=3,
                c=40,
                k=40,
                groups=10,
                filter=(1, 2, 5),
                stride=(1, 2, 1),
                dilation=(1, 1, 2),
                begin=(0, 1, 3),
                end=(0, 0, 4),
                size=(1, 11, 19),
            ),
            alpha=0.5,
        ),
    ),
    "merged_eights": (
        MERGED.replace(groups_merged=8, a="bf16", b="bf16", c="fp32", **FIXED2, channel_tile=32),
        shapes(EIGHTS2),
    ),
    "merged_twos_data": (
        MERGED.replace(groups_merged=32, direction="backward_data", **FIXED2, grouped=True, linear_rows=False),
        shapes(Shape(c=24, k=24, groups=12, stride=(1, 2, 2), size=(1, 9, 14))),
    ),
    "merged_eights_data": (
        MERGED.replace(
            groups_merged=8,
            direction="backward_data",
            filter=(1, 3, 5),
            stride=(1, 3, 2),
            dilation=(1, 2, 2),
            grouped=True,
            linear_rows=False,
            pixel_tile=(2, 2, 8),
        ),
        shapes(
            Shape(
                c=24,
                k=24,
                groups=3,
                filter=(1, 3, 5),
                stride=(1, 3, 2),
                dilation=(1, 2, 2),
                size=(1, 12, 14),
                begin=(0, 2, 4),
                end=(0, 2, 4),
            )
        ),
    ),
    "merged_eights_weight": (
        MERGED.replace(groups_merged=8, direction="backward_weight", **FIXED2, c="fp32", accumulate=True),
        [{"shape": EIGHTS2, "split_k": 4, "alpha": 0.5}],
    ),
    "merged_line": (
        MERGED.replace(groups_merged=16, ndim=1, filter=(0, 0, 3), stride=(0, 0, 1), dilation=(0, 0, 1)),
        shapes(Shape(c=16, k=16, groups=4, size=(1, 1, 21), filter=(1, 1, 3), begin=(0, 0, 1), end=(0, 0, 1), ndim=1)),
    ),
    "merged_pairs": (
        MERGED.replace(groups_merged=8, **FIXED2, channel_tile=32, pixel_tile=(3, 4, 8), bias="fp32"),
        [*shapes(EIGHTS2), {"shape": EIGHTS2, "gap": 8}, {"shape": EIGHTS2, "result_gap": 8}],
    ),
    "merged_steps": (  # four waves on two blocks of channels; several steps of a tile, and strips of 16 pixels
        MERGED.replace(groups_merged=16, **FIXED2, wave=(4, 1), channel_tile=32, pixel_tile=(2, 16, 32), bias="fp16"),
        shapes(Shape(c=40, k=40, groups=10, stride=(1, 2, 2), size=(1, 41, 45))),
    ),
    "merged_sixteens": (
        MERGED.replace(groups_merged=4, **FIXED, channel_tile=32, pixel_tile=(1, 8, 16)),
        shapes(Shape(c=48, k=48, groups=3, size=(1, 9, 19))),
    ),
    "merged_sixteens_data": (
        MERGED.replace(
            groups_merged=4,
            direction="backward_data",
            **FIXED2,
            channel_tile=32,
            wave=(4, 1),
            grouped=True,
            linear_rows=False,
        ),
        shapes(Shape(c=48, k=48, groups=3, stride=(1, 2, 2), size=(1, 9, 14))),
    ),
    "merged_thirty_twos": (
        MERGED.replace(groups_merged=2, **FIXED, wave=(4, 1), channel_tile=64, pixel_tile=(1, 8, 8)),
        shapes(Shape(c=96, k=96, groups=3, size=(1, 7, 7))),
    ),
    "merged_thirty_twos_data": (
        MERGED.replace(
            groups_merged=2,
            **FIXED,
            direction="backward_data",
            channel_tile=32,
            a="bf16",
            b="bf16",
            c="bf16",
            accumulate=True,
        ),
        shapes(Shape(c=64, k=64, groups=2, size=(1, 7, 9))),
    ),
    "merged_pairs_data": (
        MERGED.replace(groups_merged=16, **FIXED, direction="backward_data", channel_tile=32, accumulate=True),
        shapes(Shape(c=40, k=40, groups=10)),
    ),
}
# Merged groups whose lanes store their own channels: as above, of pairs of blocks at least.
CASES |= {
    name.replace("merged", "lanes"): (config.replace(epilogue="cshuffle"), settings)
    for name, (config, settings) in CASES.items()
    if config.merged and config.direction != "backward_weight" and (config.channel_tile or 8 * config.team) % 16 == 0
}
CASES |= {
    "lanes_of_four": (  # blocks, which have the channels of 32 beside one another
        MERGED.replace(
            kind="depthwise", groups_merged=64, epilogue="cshuffle", **FIXED, channel_tile=96, wave=(3, 1), bias="fp16",
            pixel_tile=(2, 8, 8),
        ),
        [
            *shapes(Shape(c=104, k=104, groups=104, size=(1, 9, 13))), {"shape": Shape(**DEEP), "gap": 8, "alpha": 0.5},
            {"shape": Shape(**DEEP), "skew": 2},
        ],
    ),
    "lanes_of_four_strided": (
        MERGED.replace(
            kind="depthwise", groups_merged=64, epilogue="cshuffle", **FIXED2, channel_tile=64, wave=(2, 1),
            pixel_tile=(1, 14, 16), a="bf16", b="bf16", c="fp32",
        ),
        shapes(Shape(c=72, k=72, groups=72, stride=(1, 2, 2), size=(1, 29, 37))),
    ),
    "lanes_of_four_data": (
        MERGED.replace(
            kind="depthwise", groups_merged=64, epilogue="cshuffle", **FIXED2, channel_tile=32, wave=(1, 1),
            direction="backward_data", grouped=True, linear_rows=False, accumulate=True,
        ),
        shapes(Shape(c=40, k=40, groups=40, stride=(1, 2, 2), size=(1, 9, 14))),
    ),
    "lanes_sixteens_steps": (  # weights arrive behind the steps of the first tile
        MERGED.replace(
            groups_merged=4, epilogue="cshuffle", **FIXED, wave=(4, 1), channel_tile=32, pixel_tile=(2, 32, 8),
        ),
        shapes(Shape(c=48, k=48, groups=3, size=(1, 35, 17))),
    ),
    "lanes_of_twos": (
        MERGED.replace(groups_merged=32, epilogue="cshuffle", **FIXED, channel_tile=32, pixel_tile=(1, 4, 32)),
        [{"shape": Shape(c=40, k=40, groups=20, size=(1, 5, 35)), "skew": skew} for skew in (0, 2)],
    ),
}  # fmt: skip
