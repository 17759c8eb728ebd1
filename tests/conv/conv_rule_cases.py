"""For every rule of convolution kernels: a valid kernel, a change that breaks the rule, and the field that it names."""

from __future__ import annotations

from typing import Any, NamedTuple

import tilewright_arch
from tilewright_grouped_conv.config.config import (
    BULK_PIPELINE,
    CONFIGS,
    DIRECT_PIPELINE,
    IM2COL_PIPELINE,
    ConvBackwardDataConfig,
    ConvBackwardWeightConfig,
    ConvConfig,
)
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, Scale, Specialization
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Reduction, Switch, Unary

__all__ = ["ALL_CASES", "CPU_CASES", "CUDA_CASES", "HIP_CASES", "Case", "depthwise", "judge"]


class Case(NamedTuple):
    """``base`` is valid on ``arch``; changed, it breaks ``rule``, which names ``field``."""

    rule: str
    field: str
    base: ConvConfig
    changes: dict[str, Any]
    arch: str
    fixable: bool = True

    def __str__(self) -> str:
        return f"{self.rule}-{self.field}-{self.arch}"

    @property
    def broken(self) -> ConvConfig:
        return self.base.replace(**self.changes)


def depthwise(direction: Direction, **fields: Any) -> ConvConfig:
    """A depthwise kernel of a GPU in half precision."""
    given: dict[str, Any] = {
        "pipeline": DIRECT_PIPELINE,
        "scheduler": "default",
        "epilogue": Epilogue.DEFAULT,
        "tile": (1, 1, 1),
        "wave": (4, 1, 1),
        "warp_tile": (1, 1, 1),
        "vector_sizes": (8, 8, 8),
        "specialization": Specialization.DEPTHWISE,
    }
    return CONFIGS[direction](**{**given, **fields})


_CPU_FIELDS: dict[str, Any] = {"pipeline": "compv3", "epilogue": Epilogue.DEFAULT, "wave": (1, 1, 1)}
_CPU_FIELDS |= {"dtype_in": DType.FP32, "tile": (168, 2048, 512), "warp_tile": (14, 32, 1)}
CPU = ConvConfig(**_CPU_FIELDS)
CPU_DATA = ConvBackwardDataConfig(**_CPU_FIELDS)
CPU_WEIGHT = ConvBackwardWeightConfig(**_CPU_FIELDS)
CPU_DEPTHWISE = depthwise(
    Direction.BACKWARD_WEIGHT, dtype_in=DType.FP32, wave=(1, 1, 1), vector_sizes=ConvConfig().vector_sizes
)
CPU_DIRECT = CPU_DEPTHWISE.replace(specialization=Specialization.DIRECT)
CPU_MATRIX = CPU.replace(explicit_gemm=True, specialization=Specialization.FILTER1X1_STRIDE1_PAD0)
INT8 = CPU.replace(dtype_in=DType.INT8, warp_tile=(14, 32, 1))
_V4 = "x86-64-v4"

CPU_CASES: tuple[Case, ...] = (
    Case("ndim_range", "ndim", CPU, {"ndim": 4}, _V4),
    Case("ndim_range", "ndim", CPU, {"ndim": 0}, _V4),
    Case("layout_matches_ndim", "layout", CPU, {"layout": "ndhwgc"}, _V4),
    Case("layout_matches_ndim", "layout", CPU, {"layout": "nhwc"}, _V4),
    Case("layout_matches_ndim", "layout", CPU, {"layout": "ngchw", "ndim": 3}, _V4),
    Case("layout_arch", "layout", CPU_WEIGHT, {"layout": "ngchw"}, _V4),
    Case("layout_arch", "mapped_rows", CPU_DATA, {"layout": "ngchw", "mapped_rows": True}, _V4),
    Case("dtype_pair", "dtype_wei", CPU, {"dtype_wei": "fp16"}, _V4),
    Case("dtype_pair", "dtype_wei", CPU, {"dtype_wei": "nonsense"}, _V4),
    Case("dtype_pair", "dtype_wei", CPU, {"dtype_in": DType.INT32}, _V4),
    Case("dtype_direction", "dtype_in", CPU_DATA, {"dtype_in": DType.INT8}, _V4, fixable=False),
    Case("dtype_direction", "dtype_in", CPU_WEIGHT, {"dtype_in": DType.FP8}, _V4, fixable=False),
    Case("output_dtype", "dtype_out", CPU, {"dtype_out": "int32"}, _V4),
    Case("output_dtype", "dtype_out", CPU, {"dtype_out": "fp8"}, _V4),
    Case("int8_output_scaled", "dtype_out", INT8, {"dtype_out": "int8"}, _V4),
    Case("epilogue_direction", "scale", CPU_DATA, {"scale": Scale.TENSOR}, _V4),
    Case("epilogue_direction", "binary", CPU_DATA, {"binary": Binary.ADD, "num_d_tensors": 1}, _V4),
    Case("epilogue_direction", "bias", CPU_WEIGHT, {"bias": "fp32"}, _V4),
    Case("epilogue_direction", "unary", CPU_WEIGHT, {"unary": Unary.RELU}, _V4),
    Case("accumulate_direction", "accumulate", CPU, {"accumulate": True}, _V4),
    Case("accumulate_direction", "unary", CPU_DATA, {"accumulate": True, "unary": Unary.RELU}, _V4),
    Case("elementwise_operands", "num_d_tensors", CPU, {"binary": Binary.MULTI_D_ADD}, _V4),
    Case("elementwise_operands", "binary", CPU, {"num_d_tensors": 1}, _V4),
    Case("epilogue_operand_dtypes", "bias", CPU, {"bias": "int32"}, _V4),
    Case("integer_output", "scale", INT8, {"scale": Scale.CHANNEL}, _V4),
    Case("integer_output", "unary", INT8, {"unary": Unary.RELU}, _V4),
    Case("mapped_rows", "mapped_rows", CPU_WEIGHT, {"mapped_rows": True}, _V4),
    Case("mapped_rows", "mapped_rows", CPU_MATRIX, {"mapped_rows": True}, _V4),
    Case("direct_pipeline", "pipeline", CPU_DEPTHWISE, {"pipeline": "compv3"}, _V4),
    Case("direct_pipeline", "tile", CPU_DEPTHWISE, {"tile": (16, 16, 16)}, _V4),
    Case("direct_pipeline", "pad_m", CPU_DEPTHWISE, {"pad_m": False}, _V4),
    Case("direct_waves", "wave", CPU_DEPTHWISE, {"wave": (1, 2, 1)}, _V4),
    Case("direct_waves", "wave", CPU_DEPTHWISE, {"wave": (5, 1, 1)}, _V4),
    Case("specialization_fields", "filter", CPU, {"filter": (1, 3, 3)}, _V4),
    Case("specialization_fields", "channel_tile", CPU, {"channel_tile": 8}, _V4),
    Case("depthwise_shape", "filter", CPU_DEPTHWISE, {"filter": (1, 8, 8)}, _V4),
    Case("depthwise_shape", "filter", CPU_DEPTHWISE, {"filter": (3, 3, 3)}, _V4),
    Case("depthwise_shape", "stride", CPU_DEPTHWISE, {"stride": (1, 0, 2)}, _V4),
    Case("depthwise_shape", "channel_tile", CPU_DEPTHWISE, {"channel_tile": 48}, _V4),
    Case("wave_groups", "num_wave_groups", CPU, {"num_wave_groups": 2}, _V4),
    Case("split_k_range", "split_k", CPU, {"split_k": 300}, _V4),
    Case("split_k_range", "split_k", CPU, {"split_k": 0}, _V4),
    Case("two_stage_direction", "two_stage", CPU, {"two_stage": True}, _V4),
    Case("two_stage_direction", "two_stage", CPU_WEIGHT, {"two_stage": True}, _V4),
    Case("stream_k_direction", "streamk", CPU, {"streamk": Reduction.TREE}, _V4),
    Case("stream_k_template", "streamk", CPU_WEIGHT, {"streamk": Reduction.LINEAR}, _V4),
    Case("stream_k_template", "streamk_persistent", CPU_WEIGHT, {"streamk_persistent": True}, _V4),
    Case("explicit_gemm_pointwise", "specialization", CPU, {"explicit_gemm": True}, _V4),
    Case("cpu_defaults", "vector_sizes", CPU, {"vector_sizes": (8, 8, 8)}, _V4),
    Case("cpu_defaults", "num_groups_to_merge", CPU, {"num_groups_to_merge": 2}, _V4),
    Case("cpu_defaults", "double_smem_buffer", CPU, {"double_smem_buffer": Switch.OFF}, _V4),
    Case("cpu_defaults", "block_per_cu", CPU, {"block_per_cu": 1}, _V4),
    Case("cpu_defaults", "split_image", CPU, {"split_image": True}, _V4),
    Case("cpu_defaults", "channel_tile", CPU_DEPTHWISE, {"channel_tile": 16}, _V4),
    Case("cpu_defaults", "pixel_tile", CPU_DEPTHWISE, {"pixel_tile": (1, 1, 4)}, _V4),
    Case("cpu_defaults", "filter", CPU_DEPTHWISE, {"filter": (1, 3, 3)}, _V4),
    Case("cpu_defaults", "stride", CPU_DIRECT, {"stride": (1, 2, 2)}, _V4),
    Case("cpu_defaults", "dilation", CPU_DIRECT, {"dilation": (1, 1, 1)}, _V4),
    Case("cpu_defaults", "pad_k", CPU, {"pad_k": False}, _V4),
    Case("cpu_specialization", "specialization", CPU, {"specialization": Specialization.FILTER3X3}, _V4),
    Case("cpu_specialization", "specialization", CPU_MATRIX, {"specialization": Specialization.FILTER1X1_PAD0}, _V4),
    Case("cpu_explicit", "explicit_gemm", CPU_WEIGHT, {"explicit_gemm": True}, _V4),
    Case("positive_sizes", "tile", CPU, {"tile": (0, 32, 32)}, _V4),
    Case("pipeline", "pipeline", CPU, {"pipeline": "compv9"}, _V4),
    Case("pipeline_template", "pipeline", CPU, {"pipeline": "mem"}, _V4),
    Case("pipeline_template", "pipeline", CPU_MATRIX, {"pipeline": "mem"}, _V4),
    Case("pipeline_template", "pipeline", CPU, {"pipeline": "compv1"}, _V4),
    Case("trait", "epilogue", CPU, {"epilogue": Epilogue.CSHUFFLE}, _V4),
    Case("wave_table", "wave", CPU, {"wave": (5, 5, 1)}, _V4),
    Case("warp_tile_table", "warp_tile", CPU, {"warp_tile": (13, 32, 1)}, _V4),
    Case("tile_divisibility", "tile", CPU, {"tile": (169, 2048, 512)}, _V4),
    Case("staging_budget", "tile", CPU, {"tile": (14 * 40, 2048, 2048)}, _V4),
    Case("shared_block", "tile", CPU, {"tile": (168, 65504, 512)}, _V4),
    Case("direct_order", "layout", CPU_DIRECT, {"layout": "ngchw"}, _V4),
    Case("accumulators_fit_registers", "warp_tile", CPU, {"warp_tile": (28, 32, 1)}, _V4),
    Case("stage_count", "stages", CPU, {"stages": 3}, _V4),
    Case("cpu_waves", "wave", CPU, {"wave": (1, 2, 2)}, _V4),
)

_CUDA_FIELDS: dict[str, Any] = {"tile": (128, 128, 32), "wave": (2, 2, 1), "warp_tile": (16, 8, 16)}
CUDA = ConvConfig(**_CUDA_FIELDS)
CUDA_DATA = ConvBackwardDataConfig(**_CUDA_FIELDS)
CUDA_WEIGHT = ConvBackwardWeightConfig(**_CUDA_FIELDS)
CUDA_INT8 = CUDA.replace(dtype_in=DType.INT8, warp_tile=(16, 8, 32), tile=(64, 64, 64), vector_sizes=(16, 16, 4))
_IM2COL_FIELDS: dict[str, Any] = {
    "pipeline": IM2COL_PIPELINE,
    "scheduler": "cooperative",
    "tile": (128, 128, 64),
    "wave": (2, 1, 1),
    "warp_tile": (64, 128, 16),
    "vector_sizes": (8, 8, 8),
}
IM2COL = ConvConfig(**_IM2COL_FIELDS)
IM2COL_DATA = ConvBackwardDataConfig(**_IM2COL_FIELDS)
IM2COL_WEIGHT = ConvBackwardWeightConfig(**_IM2COL_FIELDS)
"""Kernels whose pixels a copy engine gathers."""
_HOPPER = "sm_90a"
_DEPTHWISE = {direction: depthwise(direction) for direction in Direction}
_MERGED = {
    direction: kernel.replace(
        num_groups_to_merge=64,
        channel_tile=64,
        pixel_tile=(1, 8, 8),
        filter=(1, 3, 3),
        stride=(1, 1, 1),
        dilation=(1, 1, 1),
    )
    for direction, kernel in _DEPTHWISE.items()
}
_BULK_FIELDS: dict[str, Any] = {"pipeline": BULK_PIPELINE, "epilogue": Epilogue.CSHUFFLE, "pixel_tile": (2, 8, 8)}
_BULK = {direction: kernel.replace(**_BULK_FIELDS) for direction, kernel in _MERGED.items()}

CUDA_CASES: tuple[Case, ...] = (
    Case("layout_arch", "layout", CUDA, {"layout": "ngchw"}, _HOPPER),
    Case("direct_waves", "wave", _DEPTHWISE[Direction.FORWARD], {"wave": (2, 2, 1)}, _HOPPER),
    Case("direct_waves", "wave", _DEPTHWISE[Direction.FORWARD], {"wave": (64, 1, 1)}, _HOPPER),
    Case("direct_vectors", "vector_sizes", _DEPTHWISE[Direction.FORWARD], {"vector_sizes": (8, 1, 1)}, _HOPPER),
    Case("direct_vectors", "vector_sizes", _DEPTHWISE[Direction.FORWARD], {"layout": "ngchw"}, _HOPPER),
    Case("direct_tile", "channel_tile", _DEPTHWISE[Direction.FORWARD], {"channel_tile": 4}, _HOPPER),
    Case("direct_tile", "filter", _DEPTHWISE[Direction.FORWARD], {"filter": (1, 3, 3)}, _HOPPER),
    Case("direct_tile", "pixel_tile", _DEPTHWISE[Direction.FORWARD], {"pixel_tile": (1, 4, 4)}, _HOPPER),
    Case(
        "direct_tile",
        "filter",
        _DEPTHWISE[Direction.FORWARD],
        {"filter": (1, 5, 5), "stride": (1, 1, 1), "dilation": (1, 1, 1)},
        _HOPPER,
    ),
    Case(
        "direct_tile",
        "num_d_tensors",
        _DEPTHWISE[Direction.FORWARD].replace(layout="ngchw", vector_sizes=(1, 1, 1)),
        {"num_d_tensors": 1, "binary": Binary.ADD},
        _HOPPER,
    ),
    Case(
        "direct_tile",
        "filter",
        _DEPTHWISE[Direction.BACKWARD_DATA].replace(filter=(1, 3, 3), stride=(1, 2, 2), dilation=(1, 1, 1)),
        {"mapped_rows": True},
        _HOPPER,
    ),
    Case("mapped_rows", "mapped_rows", _DEPTHWISE[Direction.FORWARD], {"mapped_rows": True}, _HOPPER),
    Case("split_k_direction", "split_k", _DEPTHWISE[Direction.FORWARD], {"split_k": 2}, _HOPPER),
    Case("split_k_direction", "split_k", CUDA_DATA, {"split_k": 2, "mapped_rows": True}, _HOPPER),
    Case("two_stage_direction", "two_stage", CUDA_DATA, {"two_stage": True}, _HOPPER),
    Case("two_stage_direction", "two_stage", _DEPTHWISE[Direction.BACKWARD_WEIGHT], {"two_stage": True}, _HOPPER),
    Case(
        "two_stage_excludes_stream_k",
        "two_stage",
        CUDA_WEIGHT,
        {"two_stage": True, "streamk": Reduction.LINEAR},
        _HOPPER,
    ),
    Case("im2col_signature", "pipeline", IM2COL_DATA, {"mapped_rows": True}, _HOPPER),
    Case("im2col_signature", "pipeline", IM2COL_DATA, {"accumulate": True}, _HOPPER),
    Case("im2col_fields", "specialization", IM2COL, {"specialization": Specialization.FILTER3X3}, _HOPPER),
    Case("im2col_fields", "vector_sizes", IM2COL, {"vector_sizes": (4, 8, 8)}, _HOPPER),
    Case("im2col_fields", "split_image", IM2COL, {"split_image": True}, _HOPPER),
    Case("im2col_fields", "two_stage", IM2COL_WEIGHT, {"two_stage": True}, _HOPPER),
    Case("im2col_consumers", "num_wave_groups", IM2COL, {"num_wave_groups": 2}, _HOPPER),
    Case("im2col_consumers", "num_wave_groups", IM2COL, {"scheduler": "pingpong"}, _HOPPER),
    Case("im2col_consumers", "wave", IM2COL, {"scheduler": "pingpong", "num_wave_groups": 2}, _HOPPER),
    Case("im2col_tile", "tile", IM2COL, {"tile": (128, 128, 128)}, _HOPPER),
    Case("im2col_tile", "tile", IM2COL, {"tile": (128, 192, 64)}, _HOPPER),
    Case("im2col_tile", "tile", IM2COL_WEIGHT, {"tile": (128, 128, 96)}, _HOPPER),
    Case("im2col_tile", "warp_tile", IM2COL_DATA, {"warp_tile": (64, 96, 16), "tile": (128, 96, 64)}, _HOPPER),
    Case("im2col_lines", "epilogue", IM2COL, {"warp_tile": (64, 96, 16), "tile": (128, 96, 64)}, _HOPPER),
    Case("trait", "scheduler", CUDA, {"scheduler": "interwave"}, _HOPPER),
    Case("interwave_pipeline", "scheduler", CUDA, {"scheduler": "interwave"}, _HOPPER),
    Case("backward_not_compv5", "pipeline", CUDA_WEIGHT, {"pipeline": "compv5"}, _HOPPER),
    Case("vector_sizes", "vector_sizes", CUDA, {"vector_sizes": (3, 8, 8)}, _HOPPER),
    Case("vector_sizes", "vector_sizes", CUDA, {"vector_sizes": (8, 16, 8)}, _HOPPER),
    Case("vector_sizes", "vector_sizes", CUDA, {"dtype_out": "fp32"}, _HOPPER),
    Case("vector_sizes", "vector_sizes", CUDA, {"vector_sizes": (0, 8, 8)}, _HOPPER),
    Case("line_chunks", "tile", CUDA, {"tile": (128, 128, 48)}, _HOPPER),
    Case("line_chunks", "tile", CUDA_WEIGHT, {"tile": (128, 96, 32)}, _HOPPER),
    Case("merge_groups", "num_groups_to_merge", CUDA, {"num_groups_to_merge": 3}, _HOPPER),
    Case("merge_groups", "num_groups_to_merge", CUDA, {"num_groups_to_merge": 64}, _HOPPER),
    Case("merge_groups", "num_groups_to_merge", CUDA, {"num_groups_to_merge": 0}, _HOPPER),
    Case("merge_groups", "num_groups_to_merge", CUDA_WEIGHT, {"num_groups_to_merge": 2}, _HOPPER),
    Case("direct_sums", "dtype_out", _DEPTHWISE[Direction.FORWARD], {"dtype_in": DType.INT8}, _HOPPER),
    Case("merged_shape", "num_groups_to_merge", _DEPTHWISE[Direction.FORWARD], {"num_groups_to_merge": 2}, _HOPPER),
    Case("merged_shape", "num_groups_to_merge", _DEPTHWISE[Direction.FORWARD], {"num_groups_to_merge": 64}, _HOPPER),
    *(
        Case("merged_shape", "num_groups_to_merge", _MERGED[direction], changes, _HOPPER)
        for direction, changes in (
            (Direction.FORWARD, {"vector_sizes": (4, 4, 4)}),
            (Direction.FORWARD, {"pixel_tile": (-1, -2, 8)}),
            (Direction.FORWARD, {"filter": (1, 11, 11)}),
            (Direction.FORWARD, {"epilogue": Epilogue.CSHUFFLE, "channel_tile": 8, "wave": (1, 1, 1)}),
            (Direction.FORWARD, {"epilogue": Epilogue.CSHUFFLE, "filter": (1, 5, 5)}),
            (Direction.BACKWARD_WEIGHT, {"channel_tile": 0, "wave": (3, 1, 1)}),
            (Direction.BACKWARD_WEIGHT, {"filter": (1, 7, 7)}),
        )
    ),
    *(
        Case("bulk_shape", "pipeline", _BULK[direction], changes, _HOPPER)
        for direction, changes in (
            (Direction.FORWARD, {"dtype_out": "fp32", "vector_sizes": (8, 8, 4)}),
            (Direction.FORWARD, {"channel_tile": 96, "wave": (6, 1, 1)}),
            (Direction.FORWARD, {"wave": (3, 1, 1)}),
            (Direction.FORWARD, {"filter": (1, 5, 5)}),
            (Direction.FORWARD, {"pixel_tile": (3, 14, 56)}),
            (Direction.FORWARD, {"pixel_tile": (1, 14, 8), "dilation": (1, 2, 1)}),
            (Direction.FORWARD, {"num_groups_to_merge": 1}),
            (Direction.BACKWARD_DATA, {"stride": (1, 2, 2)}),
        )
    ),
    Case("bulk_shape", "pipeline", _MERGED[Direction.FORWARD], _BULK_FIELDS, "sm_80"),
    Case("bulk_shape", "pipeline", _MERGED[Direction.BACKWARD_WEIGHT], _BULK_FIELDS, _HOPPER),
    Case("block_per_cu", "block_per_cu", CUDA, {"block_per_cu": 9}, _HOPPER),
    Case("block_per_cu", "block_per_cu", CUDA, {"block_per_cu": 8}, _HOPPER),
    Case("block_per_cu", "block_per_cu", _DEPTHWISE[Direction.FORWARD], {"block_per_cu": 1}, _HOPPER),
    Case(
        "split_image_gpu",
        "split_image",
        CUDA.replace(explicit_gemm=True, specialization=Specialization.FILTER1X1_STRIDE1_PAD0),
        {"split_image": True},
        _HOPPER,
    ),
    Case("paired_columns", "tile", CUDA_INT8, {"layout": "ngchw", "tile": (64, 48, 64)}, _HOPPER),
    Case("always_padded", "pad_n", CUDA, {"pad_n": False}, _HOPPER),
    Case("double_buffer", "double_smem_buffer", CUDA, {"double_smem_buffer": Switch.OFF}, _HOPPER),
    Case("wave_table", "wave", CUDA, {"wave": (3, 3, 1)}, _HOPPER),
    Case("warp_tile_table", "warp_tile", CUDA, {"warp_tile": (32, 32, 16)}, _HOPPER),
    Case("workgroup_threads", "wave", CUDA, {"wave": (8, 8, 1)}, _HOPPER),
    Case("tile_minimum", "tile", CUDA, {"tile": (128, 128, 20)}, _HOPPER),
    Case("tile_divisibility", "tile", CUDA, {"tile": (144, 128, 32)}, _HOPPER),
    Case("accumulators_fit_registers", "tile", CUDA, {"tile": (256, 256, 32)}, _HOPPER),
    Case(
        "shared_memory",
        "stages",
        CUDA.replace(tile=(128, 128, 64), stages=3),
        {"stages": 6, "tile": (256, 128, 128), "wave": (4, 2, 1)},
        _HOPPER,
    ),
    Case("stage_count", "stages", CUDA, {"stages": 9}, _HOPPER),
    Case("gpu_waves", "wave", CUDA, {"wave": (2, 1, 2)}, _HOPPER),
)

HIP = ConvConfig()
HIP_DATA = ConvBackwardDataConfig(pipeline="compv3")
HIP_WEIGHT = ConvBackwardWeightConfig(pipeline="compv3")
RDNA = ConvConfig(wave=(2, 4, 1), warp_tile=(16, 16, 16))
_MI = "gfx942"

HIP_CASES: tuple[Case, ...] = (
    Case("dtype_pair", "dtype_in", RDNA, {"dtype_in": DType.FP8}, "gfx1100", fixable=False),
    Case("layout_arch", "layout", HIP, {"layout": "ngchw"}, _MI),
    Case("backward_pipeline", "pipeline", HIP_DATA, {"pipeline": "compv4"}, _MI),
    Case("backward_pipeline", "pipeline", HIP_WEIGHT, {"pipeline": "compv4"}, _MI),
    Case("backward_not_compv5", "pipeline", HIP_DATA, {"pipeline": "compv5"}, _MI),
    Case("pipeline_template", "pipeline", HIP, {"pipeline": "preshufflev2"}, _MI),
    Case("pipeline_template", "pipeline", HIP, {"pipeline": "comp_async"}, "gfx950"),
    Case("taps_vectors", "vector_sizes", HIP, {"pipeline": "taps", "vector_sizes": (4, 8, 8)}, _MI),
    Case("taps_product", "pipeline", HIP_WEIGHT, {"pipeline": "taps"}, _MI),
    Case("warp_coverage", "vector_sizes", HIP.replace(tile=(256, 128, 32)), {"vector_sizes": (2, 8, 8)}, _MI),
    Case("warp_coverage", "vector_sizes", HIP_DATA.replace(tile=(128, 256, 32)), {"vector_sizes": (4, 2, 8)}, _MI),
    Case(
        "backward_data_vectors",
        "vector_sizes",
        HIP_DATA.replace(tile=(64, 128, 16), vector_sizes=(4, 8, 8), warp_tile=(32, 32, 8)),
        {"vector_sizes": (8, 8, 8)},
        _MI,
    ),
    Case("compv6_vectors", "vector_sizes", HIP, {"pipeline": "compv6", "tile": (16, 16, 32)}, _MI),
    Case("interwave_pipeline", "scheduler", HIP, {"scheduler": "interwave"}, _MI),
    Case("wave32_tiles", "warp_tile", RDNA, {"warp_tile": (32, 32, 16)}, "gfx1201"),
    Case("stream_k_direction", "streamk", HIP_WEIGHT, {"streamk": Reduction.TREE}, _MI),
    Case("merge_groups", "num_groups_to_merge", HIP, {"num_groups_to_merge": 5}, _MI),
    Case("block_per_cu", "block_per_cu", HIP, {"block_per_cu": 1}, _MI),
    Case("wave_table", "wave", HIP, {"wave": (2, 4, 1)}, _MI),
    Case("warp_tile_table", "warp_tile", HIP, {"warp_tile": (16, 16, 4)}, _MI),
    Case("shared_memory", "tile", HIP, {"tile": (256, 256, 64)}, _MI),
    Case("staging_budget", "tile", HIP, {"tile": (256, 256, 64)}, _MI),
    Case("direct_vectors", "vector_sizes", depthwise(Direction.FORWARD), {"vector_sizes": (4, 8, 8)}, _MI),
)

ALL_CASES = (*CPU_CASES, *CUDA_CASES, *HIP_CASES)


def judge(case: Case) -> None:
    """What is said of the case holds: the rule speaks, and what it asks for mends."""
    arch = tilewright_arch.load(case.arch)
    assert RULES.check(case.base, arch) == ()
    spoken = [item for item in RULES.check(case.broken, arch) if (item.rule, item.field) == (case.rule, case.field)]
    assert len(spoken) == 1
    assert spoken[0].reason
    assert bool(spoken[0].fix) == case.fixable
    if case.fixable:
        mended = RULES.check(case.broken.replace(**spoken[0].fix), arch)
        assert (case.rule, case.field) not in {(item.rule, item.field) for item in mended}
    assert RULES.correct(case.broken, arch).is_valid == case.fixable
