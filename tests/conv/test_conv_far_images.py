"""Images that a buffer of an AMD GPU (2 GiB) does not hold all of: launches over ranges of images, or a refusal. The
images lie far apart in the emulator's memory, which holds nothing between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conv_requests import backward_data, backward_weight, forward, last

import tilewright_arch
from tilewright_emulator import CodeObject, Memory
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import TAPS
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, conv_mismatches
from tilewright_grouped_conv.plan.plan import plan_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.references.reference import reference_conv
from tilewright_grouped_conv.vocabulary import Kind
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.plan import COUNTERS, I64, WORKSPACE, Pointer, pack
from tilewright_kit.contract.problem import Role
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.build.toolchains.hip import HipToolchain

GIB = 1 << 30
FAR = 5 * GIB // 8
"""Elements of two bytes from image to image: of three the last one begins at 2.5 GiB."""
APART = 16 * GIB


def far(dtype: str, n: int, c: int, size: int, step: int = FAR) -> TensorDesc:
    return TensorDesc.of(dtype, (n, c, size, size), (step, 1, size * c, c))


def problem_of(kind: str, dtype: str = "bf16", n: int = 3, step: int = FAR) -> ConvProblem:
    groups = 16 if kind.startswith("depthwise") else 1
    c, k = (
        (16, 16) if groups > 1 else (64, 64) if kind.endswith("taps") else (24, 32) if kind == "gradient" else (32, 24)
    )
    w, x, y = last(dtype, k, c // groups, 3, 3), far(dtype, n, c, 5, step), far(dtype, n, k, 5, step)
    near, given = last(dtype, n, k, 5, 5), {"padding": 1, "groups": groups}
    if kind == "gradient":
        return backward_data({"dy": y, "w": w}, input_size=(5, 5), **given)
    if kind.endswith("weights"):
        return backward_weight({"x": x, "dy": near}, filter_size=(3, 3), **given)
    return forward({"x": x, "w": w}, **given)


def kernel(problem: ConvProblem, kind: str, name: str) -> ConvConfig:
    found = conv_candidates(problem, device_of(tilewright_arch.load(name)))
    wanted = Kind.DEPTHWISE if kind.startswith("depthwise") else Kind.IMPLICIT
    return next(
        item for item in found if item.kind is wanted and TAPS.makes(item) == kind.endswith("taps")
        and (item.pipeline != "compv4" or kind.endswith("taps"))
    )  # fmt: skip


def run(problem: ConvProblem, config: ConvConfig, name: str, hip_toolchain: HipToolchain, folder: Path) -> int:
    """Plan, build, run, compare; returns the number of stages."""
    arch = tilewright_arch.load(name)
    plan, rng = plan_conv(problem, config, device_of(arch)), np.random.default_rng(5)
    memory, arrays = Memory(), {}
    addresses: dict[Any, int] = {}
    for number, item in enumerate(plan.operands):
        own, desc = item.role is Role.INPUT, item.desc
        kept = np.empty([desc.shape[i] for i in (0, 2, 3, 1)], desc.dtype.numpy)
        kept[...] = rng.standard_normal(kept.shape).astype(np.float32) if own else np.nan
        addresses[item.name] = address = (0x7000 << 32) + number * APART
        # Every image for itself.
        for index, image in enumerate(kept):
            place = address + index * desc.strides[0] * desc.dtype.bytes
            memory.map(place, image.reshape(-1).view(np.uint8), f"{item.name} {index}", writable=not own)
        arrays[item.name] = np.moveaxis(kept, -1, 1)
    extra: dict[Any, Any] = {WORKSPACE: plan.workspace_bytes, COUNTERS: plan.counter_bytes}
    for number, (what, nbytes) in enumerate(extra.items(), len(addresses)):
        addresses[what] = (0x7000 << 32) + number * APART
        fill = 0xFF if what == WORKSPACE else 0  # NaN
        memory.map(addresses[what], np.full(nbytes // 16 * 16 + 16, fill, np.uint8), str(what))
    unit = generate(config, arch)
    code = CodeObject.load(hip_toolchain.compile(unit, folder, arch).binary.read_bytes())
    for stage in plan.stages:
        packed = pack(stage.args)
        block = bytearray(len(packed.template))
        packed.bind(addresses, block, 0x6F00 << 32)
        code.kernel(unit.entries[stage.role]).launch(
            memory, grid=stage.geometry.grid, block=stage.geometry.block, arguments=bytes(block[: packed.root_bytes]),
            dynamic_lds=stage.geometry.shared_bytes,
        )  # fmt: skip
    inputs = {item.name: arrays[item.name] for item in plan.operands if item.role is Role.INPUT}
    for output, truth in reference_conv(problem, inputs).items():
        np.testing.assert_allclose(arrays[output].astype(np.float64), truth.astype(np.float64), rtol=1e-2, atol=4e-2)
    return len(plan.stages)


@pytest.mark.parametrize("kind", ["depthwise", "gradient", "forward", "weights", "forward taps", "depthwise weights"])
@pytest.mark.some(2)
def test_an_image_beyond_two_gib_is_read(kind: str, hip_toolchain: HipToolchain, tmp_path: Path) -> None:
    problem = problem_of(kind)
    config = kernel(problem, kind, "gfx942")
    # Two images, and the third one; of weights with the sum of what these leave behind.
    assert run(problem, config, "gfx942", hip_toolchain, tmp_path) == (3 if kind.endswith("weights") else 2)


@pytest.mark.parametrize("name", ["gfx942", "gfx1201"])
@pytest.mark.parametrize("kind", ["forward", "gradient", "weights", "depthwise", "depthwise weights"])
def test_kernels_for_one_launch_are_refused_with_what_helps(kind: str, name: str) -> None:
    problem, device = problem_of(kind), device_of(tilewright_arch.load(name))
    config = kernel(problem, kind, name)
    assert not conv_mismatches(problem, config, device)
    plain = config.replace(split_image=False, two_stage=False, split_k=1)
    (found,) = conv_mismatches(problem, plain, device)
    assert found.rule == "range" and "only 2 images at a time" in found.reason
    assert not conv_mismatches(problem, plain.replace(**found.fix), device)
    assert conv_mismatches(problem_of(kind, step=GIB // 4), plain, device) == ()


@pytest.mark.parametrize(("dtype", "step", "most"), [("fp32", GIB // 8, 4), ("bf16", GIB // 4, 4), ("fp16", GIB, 1)])
def test_ranges_are_counted_in_bytes_on_amd_gpus(dtype: str, step: int, most: int) -> None:
    problem = problem_of("depthwise", dtype, 7, step)
    for name, images in (("gfx942", most), ("gfx1100", most), ("sm_90a", 7 if step * 7 < 2**31 else 2)):
        device = device_of(tilewright_arch.load(name))
        config = next(
            item for item in conv_candidates(problem, device) if item.layout == "nhwgc" and not item.is_matrix
        )
        assert config.split_image == (images < 7)
        stages = plan_conv(problem, config, device).stages
        assert len(stages) == -(-7 // images)


@pytest.mark.parametrize("name", ["gfx942", "sm_80"])
def test_all_slices_of_all_ranges_are_added(name: str) -> None:
    """Each range leaves its slices behind those of the one before; kernels are made for at most ``split_k`` of them."""
    problem, device = problem_of("weights", n=7, step=GIB), device_of(tilewright_arch.load(name))
    for config in conv_candidates(problem, device):
        assert config.split_image and (config.two_stage or not config.is_matrix)
        *mains, convert = plan_conv(problem, config, device).stages
        begin = at = slices = 0
        for number, stage in enumerate(mains):
            scratch, split, nbytes = (stage.args.fields[index] for index in (3, 5, 6))
            assert isinstance(scratch, Pointer) and isinstance(split, I64) and isinstance(nbytes, I64)
            begin = at = at if number else scratch.offset
            assert scratch == Pointer(WORKSPACE, begin) and nbytes.value == split.value * 24 * 32 * 9 * 4
            at, slices = at + nbytes.value, slices + split.value
        _, _, _, scratch, _, split, nbytes, *_ = convert.args.fields
        first = mains[0].args.fields[3]
        assert isinstance(first, Pointer) and scratch == first and isinstance(split, I64) and isinstance(nbytes, I64)
        assert split.value == slices <= config.split_k and nbytes.value == at - first.offset
        assert convert.role == "convert" and len(mains) == (7 if name == "gfx942" else 4)


def test_whole_taps_keep_a_filters_reach_ahead_of_the_image_and_beyond_it() -> None:
    device = device_of(tilewright_arch.load("gfx942"))
    problem = problem_of("forward taps", n=2, step=GIB - 5 * 5 * 64 - 8)  # ends 16 bytes before the buffer's end
    (taps, plain) = (
        next(item for item in conv_candidates(problem, device) if TAPS.makes(item) == wanted)
        for wanted in (True, False)
    )
    assert taps.split_image and not plain.split_image
    reach = 2 * (2 * 5 * 64 + 2 * 64)  # two lines and two pixels, ahead and beyond
    nearer = problem_of("forward taps", n=2, step=problem.image.n - reach)
    assert not any(item.split_image for item in conv_candidates(nearer, device))


def test_one_image_of_more_than_two_gib_is_refused_where_pixels_are_gathered() -> None:
    device = device_of(tilewright_arch.load("gfx942"))
    config = kernel(problem_of("forward"), "forward", "gfx942")
    tensors = {"x": last("bf16", 1, 32, 6000, 6000), "w": last("bf16", 24, 32, 3, 3)}
    (found,) = conv_mismatches(forward(tensors, padding=1), config, device)
    assert found.rule == "range" and "not even one image" in found.reason and not found.fix


def test_matrices_have_offsets_of_64_bits_but_for_the_lines_of_a_tile() -> None:
    device = device_of(tilewright_arch.load("gfx942"))
    large = forward({"x": last("bf16", 3, 64, 4100, 4100), "w": last("bf16", 64, 64, 1, 1)})
    config = next(item for item in conv_candidates(large, device) if item.kind is Kind.POINTWISE)
    assert not config.split_image
    apart = forward({"x": far("bf16", 300, 64, 1, GIB // 64), "w": last("bf16", 64, 64, 1, 1)})
    (found,) = conv_mismatches(apart, config, device)
    assert found.rule == "range" and "lines of x" in found.reason
