"""Every problem has kernels, none that cannot compute it, and copies only where they are needed or worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conv_requests import backward_data, backward_weight, first, forward, last

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.applicability.gpu import channel_vectors, strict_vectors
from tilewright_grouped_conv.candidates.applicability.tensors import (
    needed_transforms,
    needs_mapped_rows,
    with_signature,
)
from tilewright_grouped_conv.candidates.gpu import splits
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL
from tilewright_grouped_conv.pipelines.candidates import (
    MOST_CPU,
    MOST_GPU,
    conv_candidates,
    conv_mismatches,
    predict_conv,
)
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.references.samples import conv_samples
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Unary

ARCHS = tilewright_arch.names()


def archs() -> list[ArchSpec]:
    return [tilewright_arch.load(name) for name in ARCHS]


def on(arch: ArchSpec) -> DeviceInfo:
    return device_of(arch)


def problems(dtype: str) -> list[ConvProblem]:
    """All directions of plain, strided, grouped, depthwise and channels-first convolutions."""
    found = []
    for make in (last, first):
        for c, k, groups, stride, size, taps in (
            (64, 96, 1, 1, 14, 3),
            (3, 16, 1, 2, 17, 7),
            (12, 20, 4, 2, 9, 3),
            (24, 24, 24, 1, 11, 3),
            (32, 48, 1, 1, 8, 1),
        ):
            pad = taps // 2
            out = (size + 2 * pad - taps) // stride + 1
            x, w, y = (
                make(dtype, 2, c, size, size),
                make(dtype, k, c // groups, taps, taps),
                make(dtype, 2, k, out, out),
            )
            asked: dict[str, Any] = {"groups": groups, "stride": stride, "padding": pad}
            found.append(forward({"x": x, "w": w}, **asked))
            if dtype in ("fp32", "fp16", "bf16"):
                found.append(backward_data({"dy": y, "w": w}, input_size=(size, size), **asked))
                found.append(backward_weight({"x": x, "dy": y}, filter_size=(taps, taps), **asked))
    return found


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_problem_has_kernels_that_are_valid_and_fit(name: str, dtype: str) -> None:
    device = on(tilewright_arch.load(name))
    most = MOST_CPU if device.arch.kind == "cpu" else MOST_GPU
    for problem in problems(dtype):
        found = conv_candidates(problem, device)
        assert 0 < len(found) <= most, problem.describe()
        assert len(set(found)) == len(found)
        for config in found:
            assert not RULES.check(config, device.arch), config.name
            assert not conv_mismatches(problem, config, device), config.name
        general = found[-1]
        assert general.kind is Kind.IMPLICIT and (general.pad_m, general.pad_n, general.pad_k) == (True, True, True)


@pytest.mark.parametrize("dtype", ["fp16", "int8", "fp8"])
def test_forward_has_kernels_of_every_type_that_an_arch_multiplies(dtype: str) -> None:
    for arch in archs():
        if not arch.acc_dtype(dtype, dtype):
            continue
        problem = forward({"x": last(dtype, 1, 32, 8, 8), "w": last(dtype, 16, 32, 3, 3)}, padding=1)
        assert conv_candidates(problem, on(arch)), arch.id


def test_candidates_are_the_same_every_time() -> None:
    for arch in archs():
        for direction in Direction:
            for asked in conv_samples(direction):
                problem = parse_conv(asked, direction)
                assert conv_candidates(problem, on(arch)) == conv_candidates(parse_conv(asked, direction), on(arch))


# ---- copies ----


def test_channels_first_images_need_no_copy_on_a_cpu_that_copies_may_still_beat(device: DeviceInfo) -> None:
    problem = forward({"x": first("fp32", 2, 16, 14, 14), "w": first("fp32", 32, 16, 3, 3)}, padding=1)
    found = conv_candidates(problem, device)
    copies = {config.channels_first: needed_transforms(problem, config, device) for config in found}
    assert copies[True] == ()
    assert [copy.operand for copy in copies[False]] == ["x", "y"]
    assert all("channels-last" in copy.reason for copy in copies[False])
    assert not found[-1].channels_first, "the most general takes any image"


@pytest.mark.parametrize(
    "x, operands",
    [
        (TensorDesc.of("fp32", (2, 16, 9, 9), (1296, 1, 144, 16)), ()),
        (TensorDesc.of("fp32", (2, 16, 9, 9), (5184, 1, 576, 64)), ()),
        (TensorDesc.of("fp32", (2, 16, 9, 9), (0, 1, 144, 16)), ()),
        (TensorDesc.of("fp32", (2, 16, 9, 9), (2592, 2, 288, 32)), ("x",)),
        (TensorDesc.of("fp32", (2, 16, 9, 9), (81, 0, 9, 1)), ("x",)),
    ],
)
def test_channels_last_kernels_copy_what_has_gaps_between_channels(
    x: TensorDesc, operands: tuple[str, ...], device: DeviceInfo
) -> None:
    problem = forward({"x": x, "w": last("fp32", 8, 16, 3, 3)}, layout="channels_last")
    general = conv_candidates(problem, device)[-1]
    assert tuple(copy.operand for copy in needed_transforms(problem, general, device)) == operands


def test_operands_that_are_added_are_copied_where_their_pixels_have_no_one_distance(device: DeviceInfo) -> None:
    tensors = {"x": last("fp32", 2, 8, 6, 6), "w": last("fp32", 8, 8, 1, 1)}
    image = TensorDesc.of("fp32", (2, 8, 6, 6), (8 * 60, 1, 80, 8))
    for d, operands in ((last("fp32", 2, 8, 6, 6), []), (image, ["d[0]"])):
        problem = forward({**tensors, "d[0]": d})
        for config in conv_candidates(problem, device):
            if not config.channels_first:
                assert [item.operand for item in needed_transforms(problem, config, device)] == operands


def test_results_with_gaps_between_lines_are_mapped_rather_than_copied(device: DeviceInfo) -> None:
    y = TensorDesc.of("fp32", (2, 8, 6, 6), (8 * 60, 1, 80, 8))
    problem = forward({"x": last("fp32", 2, 8, 6, 6), "w": last("fp32", 8, 8, 3, 3), "y": y}, padding=1)
    for config in conv_candidates(problem, device):
        assert config.mapped_rows and not needed_transforms(problem, config, device)
    plain = config.replace(mapped_rows=False)
    assert [item.rule for item in conv_mismatches(problem, plain, device)] == ["rows"]


def test_gradients_of_strided_convolutions_have_mapped_rows(device: DeviceInfo) -> None:
    tensors = {"dy": last("fp32", 2, 8, 4, 4), "w": last("fp32", 8, 8, 3, 3)}
    strided = backward_data(tensors, stride=2, padding=1, input_size=(8, 8))
    plain = backward_data(tensors, padding=1, input_size=(4, 4))
    general = conv_candidates(strided, device)[-1]
    assert general.mapped_rows and needs_mapped_rows(strided, general, device)
    assert not conv_candidates(plain, device)[-1].mapped_rows


def test_gpus_fill_channels_up_where_vectors_need_it() -> None:
    device = on(tilewright_arch.load("sm_90a"))
    problem = forward({"x": last("fp16", 8, 3, 64, 64), "w": last("fp16", 64, 3, 7, 7)}, stride=2, padding=3)
    vectors = {config.vector_sizes[0] for config in conv_candidates(problem, device)}
    assert vectors == {1, 8}
    wide = next(item for item in conv_candidates(problem, device) if item.vector_sizes[0] == 8)
    copies = needed_transforms(problem, wide, device)
    assert [(copy.operand, copy.channels) for copy in copies] == [("x", 8), ("w", 8)]
    assert "filled up" in copies[0].reason


def test_gpus_copy_weights_that_are_not_in_one_run() -> None:
    device = on(tilewright_arch.load("sm_90a"))
    problem = forward({"x": last("fp16", 8, 64, 14, 14), "w": first("fp16", 64, 64, 3, 3)}, padding=1)
    for config in conv_candidates(problem, device):
        assert [copy.operand for copy in needed_transforms(problem, config, device)] == ["w"]


def test_gpu_accesses_fit_channels_strides_and_alignment() -> None:
    tensors = {"x": last("fp16", 2, 24, 9, 9), "w": last("fp16", 20, 24, 3, 3)}
    problem = forward(tensors)
    assert channel_vectors(problem) == strict_vectors(problem) == (8, 8, 4)
    odd = TensorDesc.of("fp16", (2, 24, 9, 9), (81 * 25, 1, 9 * 25, 25))
    assert strict_vectors(forward({**tensors, "x": odd}))[0] == 1
    assert channel_vectors(forward({**tensors, "x": odd}))[0] == 8
    assert strict_vectors(forward(tensors, alignment=4))[:2] == (2, 2)
    gradient = backward_data({"dy": last("fp16", 2, 20, 9, 9), "w": tensors["w"]}, padding=1, input_size=(9, 9))
    assert channel_vectors(gradient) == (4, 8, 8)


def test_offsets_beyond_32_bits_take_launches_over_images() -> None:
    device = on(tilewright_arch.load("sm_90a"))
    x = last("fp16", 64, 256, 512, 512)
    problem = forward({"x": x, "w": last("fp16", 64, 256, 3, 3)}, padding=1)
    found = conv_candidates(problem, device)
    # The copy engine's strides have 40 bits.
    assert found and all(config.split_image != IM2COL.makes(config) for config in found)
    plain = found[-1].replace(split_image=False)
    assert "range" in {item.rule for item in conv_mismatches(problem, plain, device)}


# ---- families ----


def test_pointwise_convolutions_are_offered_as_products(device: DeviceInfo) -> None:
    problem = forward({"x": last("fp32", 2, 16, 8, 8), "w": last("fp32", 32, 16, 1, 1)})
    assert {config.kind for config in conv_candidates(problem, device)} == {Kind.POINTWISE, Kind.IMPLICIT}
    strided = forward({"x": last("fp32", 2, 16, 8, 8), "w": last("fp32", 32, 16, 1, 1)}, stride=2)
    assert {config.kind for config in conv_candidates(strided, device)} == {Kind.IMPLICIT}
    explicit = next(item for item in conv_candidates(problem, device) if item.explicit_gemm)
    assert {item.rule for item in conv_mismatches(strided, explicit, device)} == {"matrix", "constants"}


def test_depthwise_gradients_of_weights_are_computed_without_a_product(device: DeviceInfo) -> None:
    problem = backward_weight(
        {"x": last("fp32", 4, 64, 28, 28), "dy": last("fp32", 4, 64, 28, 28)}, groups=64, padding=1, filter_size=(3, 3)
    )
    found = conv_candidates(problem, device)
    best = min(found, key=lambda config: predict_conv(problem, config, device).seconds)
    assert best.kind is Kind.DEPTHWISE
    small = backward_weight(
        {"x": last("fp32", 4, 64, 28, 28), "dy": last("fp32", 4, 64, 28, 28)}, groups=8, padding=1, filter_size=(3, 3)
    )
    kinds = {config.kind for config in conv_candidates(small, device)}
    assert Kind.DIRECT in kinds and Kind.DEPTHWISE not in kinds


@pytest.mark.parametrize("name", ["gfx942", "sm_90a"])
def test_depthwise_kernels_of_gpus_compile_small_filters_in(name: str) -> None:
    device = on(tilewright_arch.load(name))
    tensors = {"x": last("fp16", 8, 96, 28, 28), "w": last("fp16", 96, 1, 3, 3)}
    problem = forward(tensors, groups=96, padding=1)
    best = min(conv_candidates(problem, device), key=lambda config: predict_conv(problem, config, device).seconds)
    assert (best.kind, best.filter, best.vector_sizes[0]) == (Kind.DEPTHWISE, (1, 3, 3), 8)
    other = forward({**tensors, "w": last("fp16", 96, 1, 5, 5)}, groups=96, padding=2)
    assert "constants" in {item.rule for item in conv_mismatches(other, with_signature(other, best, device), device)}


def test_gradients_of_weights_are_cut_until_the_device_is_full() -> None:
    device = on(tilewright_arch.load("sm_90a"))
    problem = backward_weight({"x": last("fp16", 32, 64, 56, 56), "dy": last("fp16", 32, 64, 56, 56)},
                              padding=1, filter_size=(3, 3))  # fmt: skip
    found = conv_candidates(problem, device)
    assert any(config.split_k > 1 for config in found) and any(config.two_stage for config in found)
    best = min(found, key=lambda config: predict_conv(problem, config, device).seconds)
    assert best.split_k > 1
    asked = replace(problem, split_k=7)
    assert splits(asked, asked.largest, device, (64, 64, 32)) == (7,)
    assert {config.split_k for config in conv_candidates(asked, device)} == {7}


def test_small_problems_have_no_team(device: DeviceInfo) -> None:
    problem = forward({"x": last("fp32", 1, 8, 6, 6), "w": last("fp32", 8, 8, 3, 3)})
    assert {config.waves for config in conv_candidates(problem, device)} == {1}
    large = forward({"x": last("fp32", 8, 64, 56, 56), "w": last("fp32", 64, 64, 3, 3)}, padding=1)
    assert {config.waves for config in conv_candidates(large, device)} == {1, 2}
    alone = replace(device, units=1)
    team = next(config for config in conv_candidates(large, device) if config.waves == 2)
    assert "team" in {item.rule for item in conv_mismatches(large, team, alone)}


# ---- why a kernel does not do ----


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"dtype_in": "bf16"}, "dtype_in"),
        ({"dtype_out": "bf16"}, "dtype_out"),
        ({"unary": Unary.RELU}, "unary"),
        ({"bias": "fp32"}, "bias"),
        ({"scale": "tensor"}, "scale"),
        ({"ndim": 3, "layout": "ndhwgc"}, "ndim"),
        ({"binary": "Add", "num_d_tensors": 1}, "binary"),
    ],
)
def test_kernels_of_other_signatures_say_what_differs(changes: dict[str, Any], field: str, device: DeviceInfo) -> None:
    problem = forward({"x": last("fp32", 2, 16, 8, 8), "w": last("fp32", 32, 16, 3, 3)})
    config: ConvConfig = conv_candidates(problem, device)[0]
    values = {name: config.coerce(name, getattr(value, "value", value)) for name, value in changes.items()}
    found = conv_mismatches(problem, config.replace(**values), device)
    assert field in {item.field for item in found}
    assert all(item.reason for item in found)


def test_kernels_that_do_not_pad_say_which_size_they_do_not_divide(device: DeviceInfo) -> None:
    problem = forward({"x": last("fp32", 2, 16, 8, 8), "w": last("fp32", 30, 16, 3, 3)})
    config = conv_candidates(problem, device)[-1]
    found = conv_mismatches(problem, config.replace(pad_n=False), device)
    assert [(item.rule, item.field, item.fix) for item in found] == [("padding", "pad_n", {"pad_n": True})]
