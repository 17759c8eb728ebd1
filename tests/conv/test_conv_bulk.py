"""Merged groups whose tensors a copy engine moves: figures are the header's, plans describe boxes, tensors that cannot
be described are refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
from typing import Any

import pytest
from conv_requests import backward_data, forward, last
from conv_rule_cases import depthwise
from nvrtc_programs import compiled

import tilewright_arch
from tilewright_grouped_conv.codegen import generate, header_of
from tilewright_grouped_conv.config.config import BULK_PIPELINE, ConvConfig
from tilewright_grouped_conv.footprint.tma_groups import bulk_shared_bytes, bulk_tiles
from tilewright_grouped_conv.launch.tma_groups import bulk_stages
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, conv_mismatches
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, Specialization
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.plan import Pointer, TensorMap, WorkspaceLayout, pack
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Epilogue, Unary

HOPPER, AMPERE = tilewright_arch.load("sm_90a"), tilewright_arch.load("sm_80")
DEVICE = device_of(HOPPER)


def bulk(direction: Direction = Direction.FORWARD, each: int = 4, **fields: Any) -> ConvConfig:
    """A kernel of groups of ``each`` channels, 3 x 3 taps."""
    given: dict[str, Any] = {
        "pipeline": BULK_PIPELINE,
        "epilogue": Epilogue.CSHUFFLE,
        "specialization": Specialization.DEPTHWISE if each == 1 else Specialization.DIRECT,
        "num_groups_to_merge": 64 // each,
        "channel_tile": 32,
        "pixel_tile": (2, 4, 24),
        "filter": (1, 3, 3),
        "stride": (1, 1, 1),
        "dilation": (1, 1, 1),
    }
    return depthwise(direction, **{**given, **fields})


def problem(channels: int = 96, groups: int = 24, size: int = 23, stride: int = 1, images: int = 3) -> ConvProblem:
    out = (size - 1) // stride + 1
    tensors = {
        "x": last("fp16", images, channels, size, size),
        "w": last("fp16", channels, channels // groups, 3, 3),
        "y": last("fp16", images, channels, out, out),
    }
    return forward(tensors, groups=groups, stride=stride, padding=1)


KERNELS = {
    "fours": bulk(),
    "eights_strided": bulk(each=8, stride=(1, 2, 2), channel_tile=64, pixel_tile=(3, 2, 16)),
    "depthwise": bulk(each=1, channel_tile=16, wave=(2, 1, 1), pixel_tile=(4, 8, 8)),
    "dilated": bulk(each=2, dilation=(1, 2, 3)),
    "sixteens": bulk(each=16, pixel_tile=(1, 14, 16)),
    "thirty_twos": bulk(each=32, channel_tile=64, pixel_tile=(2, 8, 8)),
    "line": bulk(ndim=1, layout="nwgc", filter=(1, 1, 3), pixel_tile=(2, 2, 64)),
    "fused": bulk(bias="fp32", unary=Unary.RELU),
    "data": bulk(Direction.BACKWARD_DATA),
    "data_sum": bulk(Direction.BACKWARD_DATA, each=16, accumulate=True),
    "data_thirty_twos": bulk(Direction.BACKWARD_DATA, each=32),
    "bf16": bulk(each=1, dtype_in=DType.BF16),
}


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs the packages of the extra `cuda`")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.some(6)
def test_kernels_compile_without_spills_and_state_the_shared_memory_that_plans_ask_for(name: str) -> None:
    config = KERNELS[name]
    text = generate(config, HOPPER).text
    figures = f"static_assert(tw::gpu::MergedBulk<Config>::bulk_bytes == {bulk_shared_bytes(config)});\n"
    log, ptx = compiled(HOPPER, text.replace("TW_CONV_KERNEL(", f"{figures}TW_CONV_KERNEL("))
    assert "0 bytes spill stores" in log and "warning" not in log, log
    for instruction in ("cp.async.bulk.tensor.4d.shared", "cp.async.bulk.tensor.4d.global", "stmatrix", "mma.sync"):
        assert instruction in ptx, instruction
    assert header_of(config) == "merged/bulk.hpp"


def stage_of(asked: ConvProblem, config: ConvConfig) -> Any:
    (stage,), counters = bulk_stages(asked, config, DEVICE, WorkspaceLayout(), Pointer())
    assert counters == 0
    return stage


def maps_of(stage: Any) -> tuple[TensorMap, TensorMap]:
    """Of the image and of the result: the first fields of the task's first struct."""
    image, result = stage.args.fields[-1].fields[0].fields[:2]
    return image, result


def test_a_plan_describes_boxes_of_both_tensors() -> None:
    asked = problem()
    stage = stage_of(asked, bulk())
    image, result = maps_of(stage)
    sizes, strides = (96, 23, 23, 3), (192, 192 * 23, 192 * 23 * 23)
    assert image == TensorMap("x", 0, "fp16", sizes, strides, (32, 26, 6, 1), 64)
    assert result == TensorMap("y", 0, "fp16", sizes, strides, (32, 24, 4, 1), 64)
    packed = pack(stage.args)
    assert [at for at, _ in packed.maps] == [64, 192] and len(packed.template) == 64 + 1088
    numbers = struct.unpack_from("<10q", packed.template, 64 + 256)
    assert numbers[:3] == (3 * 6, 1, 6) and numbers[7:] == (96, -1, -1)
    m, n = struct.unpack_from("<2q", packed.template, 64 + 384 + 24)  # the product follows, behind its three pointers
    assert (m, n) == (3 * 23 * 23, 4)
    # Blocks of channels, and a workgroup for every tile, of which there are fewer than the device holds.
    assert stage.geometry.grid == (3, 3 * 6, 1) and stage.geometry.block == (128, 1, 1)


def test_workgroups_that_keep_their_channels_share_the_tiles() -> None:
    asked, config = problem(images=512), bulk()
    blocks, tiles = bulk_tiles(asked.phases(False)[0], config, 512)
    across, share, one = stage_of(asked, config).geometry.grid
    assert (across, one) == (blocks, 1) and share < tiles and across * share <= 132 * 16
    assert stage_of(asked, config.replace(pixel_tile=(1, 4, 24))).geometry.grid == (blocks, tiles, 1)


def test_strides_of_an_image_are_those_of_its_box() -> None:
    asked = problem(stride=2, size=24)
    image, result = maps_of(stage_of(asked, bulk(stride=(1, 2, 2), pixel_tile=(2, 2, 16))))
    assert image.box == (32, 33, 5, 1) and result.box == (32, 16, 2, 1)
    assert image.sizes[1:3] == (24, 24) and result.sizes[1:3] == (12, 12)


def test_the_gradient_reads_dy_and_writes_dx() -> None:
    tensors = {name: last("fp16", 2, 64, 15, 15) for name in ("dy", "dx")} | {"w": last("fp16", 64, 4, 3, 3)}
    asked = backward_data(tensors, groups=16, padding=1)
    image, result = maps_of(stage_of(asked, bulk(Direction.BACKWARD_DATA)))
    assert (image.operand, result.operand) == ("dy", "dx")


def test_one_row_or_image_lies_at_any_distance() -> None:
    of = TensorDesc.of
    x, w = of("fp16", (1, 64, 40), (0, 1, 64)), of("fp16", (64, 4, 3), (12, 1, 4))
    asked = forward({"x": x, "w": w, "y": of("fp16", (1, 64, 40), (2560, 1, 64))}, groups=16, padding=1)
    config = KERNELS["line"].replace(dtype_in=asked.dtype_in)
    assert list(conv_mismatches(asked, config, DEVICE)) == []
    image, _ = maps_of(stage_of(asked, config))
    assert image.sizes == (64, 40, 1, 1) and image.strides == (128, 128, 128)


def test_pixels_that_share_memory_are_refused() -> None:
    of = TensorDesc.of
    x = of("fp16", (3, 96, 23, 23), (0, 1, 23 * 96, 96))
    tensors = {"x": x, "w": last("fp16", 96, 4, 3, 3), "y": last("fp16", 3, 96, 23, 23)}
    asked = forward(tensors, groups=24, padding=1)
    (found,) = conv_mismatches(asked, bulk(), DEVICE)
    assert found.rule == "bulk_strides" and "x" in found.reason


def test_more_tiles_than_a_grid_has_are_refused_where_each_is_a_workgroup() -> None:
    asked = problem(size=9, images=70000)
    single = bulk(pixel_tile=(1, 4, 8))
    assert [item.rule for item in conv_mismatches(asked, single, DEVICE)] == ["bulk_grid"]
    assert list(conv_mismatches(asked, single.replace(pixel_tile=(2, 4, 8)), DEVICE)) == []


@pytest.mark.parametrize(("groups", "stride"), [(24, 1), (24, 2), (96, 1), (6, 1), (12, 2)])
def test_devices_with_a_copy_engine_are_offered_such_kernels(groups: int, stride: int) -> None:
    asked = problem(groups=groups, stride=stride)
    found = [config for config in conv_candidates(asked, DEVICE) if config.pipeline == BULK_PIPELINE]
    assert found
    for config in found:
        assert list(RULES.check(config, HOPPER)) == list(conv_mismatches(asked, config, DEVICE)) == []
    others = conv_candidates(asked, device_of(AMPERE))
    assert others and all(config.pipeline != BULK_PIPELINE for config in others)
