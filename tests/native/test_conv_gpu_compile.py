"""Convolution kernels as NVRTC compiles them: no spills, no warnings, the instructions that they are to consist of."""

from __future__ import annotations

import re

import pytest
from conv_gpu_cases import CASES, DATA, DEPTH, FIXED, FIXED2, MERGED, PHASES, SMALL_GROUPS, WEIGHT
from conv_gpu_config import ConvGpuConfig
from gpu_config import compile_text

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the packages of the extra `cuda`")

WIDE = ConvGpuConfig(tile=(128, 128, 64), wave=(2, 2), stages=3)
BLOCKS = "m16n8k8.row.col.f32.f16"
MMA, ASYNC, TURNED = "m16n8k16.row.col.f32.f16", "cp.async.cg.shared.global", "ldmatrix.sync.aligned.m8n8.x4.trans"
KERNELS: dict[str, tuple[ConvGpuConfig, tuple[str, ...]]] = {
    "forward": (WIDE, (MMA, ASYNC)),
    "forward_small": (WIDE.replace(tile=(64, 64, 64)), (MMA, ASYNC)),
    "forward_split": (WIDE.replace(split_k=4), (MMA, "atom.global.acq_rel.gpu.add.u32")),
    "forward_elements": (WIDE.replace(tile=(256, 64, 32), wave=(4, 1), vectors=(1, 1, 8)), (MMA, "ld.global.nc.u16")),
    "forward_3d_fused": (
        WIDE.replace(ndim=3, bias="fp16", unary="FastGelu", d=("fp16",), binary="Add"), (MMA, ASYNC),
    ),
    "data": (WIDE.replace(**DATA), (MMA, ASYNC, "ldmatrix.sync.aligned.m8n8.x4.trans")),
    "data_phases": (WIDE.replace(**PHASES, accumulate=True), (MMA, ASYNC)),
    "data_three_channels": (
        WIDE.replace(**PHASES, tile=(256, 16, 32), wave=(4, 1), stages=4, vectors=(8, 1, 8)), (MMA, ASYNC),
    ),
    "weight": (WIDE.replace(**WEIGHT, split_k=4), (MMA, ASYNC, TURNED, "shfl.sync")),
    "weight_two_stages": (WIDE.replace(**WEIGHT, split_k=4, two_stage=True), (MMA, ASYNC, TURNED)),
    "fp32": (
        ConvGpuConfig(a="fp32", b="fp32", c="fp32", tile=(128, 64, 16), wave=(4, 2), vectors=(4, 4, 4)),
        ("fma.rn.f32",),
    ),
    "int8": (
        WIDE.replace(a="int8", b="int8", c="int32", vectors=(16, 16, 4)), ("m16n8k32.row.col.s32.s8.s8.s32", ASYNC),
    ),
    "depthwise": (DEPTH.replace(**FIXED, wave=(4, 1), channel_tile=32), ("fma.rn.f32", "ld.global.nc.v4.b32")),
    "depthwise_weight": (
        DEPTH.replace(**FIXED, wave=(4, 1), channel_tile=32, direction="backward_weight"), ("fma.rn.f32",),
    ),
    "groups": (SMALL_GROUPS.replace(**FIXED, wave=(4, 1), channel_tile=64), ("fma.rn.f32",)),
    "merged": (
        MERGED.replace(**FIXED, groups_merged=16, wave=(8, 1), channel_tile=128, pixel_tile=(4, 8, 8)), (BLOCKS, ASYNC),
    ),
    "merged_data": (
        MERGED.replace(**FIXED2, groups_merged=8, wave=(4, 1), channel_tile=64, grouped=True, linear_rows=False,
                       direction="backward_data"), (BLOCKS, ASYNC),
    ),
    "lanes": (
        MERGED.replace(**FIXED, kind="depthwise", groups_merged=64, wave=(6, 1), channel_tile=96, pixel_tile=(4, 8, 8),
                       epilogue="cshuffle"), (BLOCKS, MMA, ASYNC, "shfl.sync", "st.global.v2.b32"),
    ),
    "lanes_whole": (
        MERGED.replace(**FIXED, groups_merged=2, wave=(4, 1), channel_tile=64, pixel_tile=(2, 8, 8),
                       epilogue="cshuffle"), (MMA, ASYNC, "st.global.v2.b32"),
    ),
    "lanes_whole_data": (
        MERGED.replace(**FIXED, groups_merged=4, wave=(4, 1), channel_tile=64, pixel_tile=(1, 8, 16),
                       direction="backward_data", epilogue="cshuffle"), (MMA, ASYNC, TURNED, "shfl.sync"),
    ),
    "merged_weight": (
        MERGED.replace(**FIXED, groups_merged=16, wave=(8, 1), channel_tile=64, direction="backward_weight"),
        (MMA, ASYNC, TURNED),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.some(3)
def test_kernels_compile_without_spills_or_warnings(name: str) -> None:
    config, instructions = KERNELS[name]
    built = compile_text(config.unit("kernel"))
    for instruction in instructions:
        assert instruction in built.ptx, instruction
    assert built.spilled_bytes == 0, built.log
    assert re.findall(r"C75\d\d|warning", built.log) == []
    assert built.registers * config.threads <= 65536


@pytest.mark.parametrize("name", list(CASES)[::6])
@pytest.mark.some(4)
def test_what_is_emulated_compiles(name: str) -> None:
    assert compile_text(CASES[name][0].unit("kernel")).spilled_bytes == 0


def test_a_number_of_workgroups_that_a_unit_shall_hold_is_what_the_compiler_leaves_registers_for() -> None:
    for count in (1, 3):
        built = compile_text(WIDE.replace(tile=(64, 64, 64), blocks_per_unit=count).unit("kernel"))
        assert f".minnctapersm {count}" in built.ptx
        assert count * built.registers * WIDE.threads <= 65536


@pytest.mark.extended
def test_shared_memory_is_as_documented() -> None:
    """Python's formula is the template's own, but for room that only unaligned lines of matrices need."""
    for config in (WIDE, WIDE.replace(**DATA), WIDE.replace(**WEIGHT, pipeline="compv3")):
        less = "<=" if config.pipeline != "compv3" else "=="
        text = config.unit("kernel").replace(
            "TW_CONV_KERNEL(",
            f"static_assert(tw::gpu::Conv<Config_kernel>::shared_bytes {less} {config.shared_bytes});\n"
            f"static_assert(tw::gpu::Conv<Config_kernel>::threads == {config.threads});\nTW_CONV_KERNEL(",
            1,
        )
        compile_text(text)
    for config in (KERNELS["merged"][0], KERNELS["merged_data"][0]):
        text = config.unit("kernel").replace(
            "TW_CONV_KERNEL(",
            f"static_assert(tw::gpu::MergedTile<Config_kernel>::image_bytes * "
            f"(tw::gpu::MergedTile<Config_kernel>::repeats > 1 ? 2 : 1) == {config.merged_bytes});\nTW_CONV_KERNEL(",
            1,
        )
        compile_text(text)
    for config in (KERNELS["lanes"][0], KERNELS["lanes_whole"][0], KERNELS["lanes_whole_data"][0]):
        text = config.unit("kernel").replace(
            "TW_CONV_KERNEL(",
            "using Lanes = tw::gpu::MergedLanes<Config_kernel>;\n"
            "static_assert(Lanes::weight_bytes + Lanes::image_bytes * (Lanes::repeats > 1 ? 2 : 1) == "
            f"{config.merged_bytes});\nTW_CONV_KERNEL(",
            1,
        )
        compile_text(text)


def test_invalid_configurations_are_refused_with_a_reason() -> None:
    refused = {
        "tile_k is a power of two": WIDE.replace(tile=(128, 128, 48)),
        "tile_n is a power of two": WIDE.replace(**WEIGHT, tile=(128, 96, 64)),
        "vectors are powers of two": WIDE.replace(vectors=(3, 8, 8)),
        "two rows of eight pixels": MERGED.replace(**FIXED, groups_merged=16, pixel_tile=(1, 3, 8)),
        "waves share the channels": MERGED.replace(**FIXED, groups_merged=16, channel_tile=24),
        "a block holds whole groups": MERGED.replace(**FIXED, groups_merged=3),
        "channels of two blocks": MERGED.replace(
            **FIXED, groups_merged=16, channel_tile=24, wave=(1, 1), epilogue="cshuffle"
        ),
        "threads share the channels": DEPTH.replace(channel_tile=24),
    }
    for reason, config in refused.items():
        with pytest.raises(RuntimeError, match=reason):
            compile_text(config.unit("kernel"))
