"""`tilewright run conv` and `explain conv`: right in every direction, and errors that say what to do."""

from __future__ import annotations

import pytest

from tilewright_kit.commands.discovery import installed_commands
from tilewright_tools.cli.problems.loading import case_of, load

DIRECTIONS = {
    "fwd": "grouped_conv_fwd_",
    "bwd_data": "grouped_conv_bwd_data_",
    "bwd_weight": "grouped_conv_bwd_weight_",
}


@pytest.mark.extended
def test_json_has_the_fields_of_a_benchmark_helper(cli, target):
    ran = cli("run", "conv", 2, 6, 10, "9x7", "3x3", "--padding", 1, "--groups", 2, "--validate", "--json",
              "--target", target)  # fmt: skip
    assert ran.code == 0, ran.err
    record = ran.json
    assert {name: record["problem"][name] for name in "NCK"} == {"N": 2, "C": 6, "K": 10}
    assert record["kernel"].startswith("grouped_conv_fwd_fp32_nhwgc_2d_")
    flops = 2 * 2 * 10 * 9 * 7 * 3 * 9
    assert record["execution"]["tflops"] == pytest.approx(flops / (record["execution"]["time_ms"] * 1e-3) / 1e12)
    assert record["execution"]["bytes_copied"] == 0
    assert record["validation"]["accuracy"] == 100
    assert record["status"] == "success"


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "sizes",
    [
        ("3", "5", "7", "11x9", "3x2", "--stride", "2x1", "--padding", "0x1-1x0", "--dilation", "1x2"),
        ("2", "8", "8", "13", "5", "--groups", "8", "--padding", "2"),
        ("1", "6", "4", "5x4x6", "2x1x3", "--groups", "2", "--padding", "1x0x1"),
    ],
    ids=["2d", "1d-depthwise", "3d"],
)
@pytest.mark.some(3)
def test_every_direction_validates(sizes, direction, layout, cli, target):
    options = ("--direction", direction, "--layout", layout, "--repeat", 2, "--validate", "--json")
    ran = cli("run", "conv", *sizes, *options, "--target", target)
    assert ran.code == 0, ran.err
    assert ran.json["kernels"][0].startswith((DIRECTIONS[direction], "conv_transform"))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "bf8", "int8", "mixed"])
@pytest.mark.some(2)
def test_every_dtype_validates(dtype, cli, target):
    ran = cli("run", "conv", 1, 6, 8, "7x9", "3", "--padding", 1, "--dtype", dtype, "--repeat", 2, "--validate",
              "--json", "--target", target)  # fmt: skip
    assert ran.code == 0, ran.err


def test_epilogues_and_accumulation_validate(cli, target):
    ran = cli("run", "conv", 1, 4, 6, "7x9", "3", "--bias", "--activation", "Silu", "--dtype", "bf16", "--out-dtype",
              "fp32", "--repeat", 2, "--validate", "--json", "--target", target)  # fmt: skip
    assert ran.code == 0, ran.err
    assert "_Silu" in ran.json["kernel"]
    ran = cli("run", "conv", 2, 4, 6, "7x9", "3", "--direction", "bwd_weight", "--accumulate", "--repeat", 2,
              "--validate", "--json", "--target", target)  # fmt: skip
    assert ran.code == 0, ran.err


def test_kernel_can_be_named_and_a_table_is_for_people(cli, target):
    name = cli("run", "conv", 1, 8, 8, "9x9", "3", "--json", "--target", target).json["kernel"]
    ran = cli("run", "conv", 1, 8, 8, "9x9", "3", "--kernel", name, "--validate", "--target", target)
    assert ran.code == 0, ran.err
    for text in (name, "fwd 1x8x8x9x9:3s1p0 fp32", "GFLOP/s", "success"):
        assert text in ran.out


@pytest.mark.parametrize(
    ("arguments", "field", "rule"),
    [
        (("1", "5", "6", "9x9", "3", "--groups", "2"), "attributes.groups", "groups_divide_channels"),
        (("1", "4", "6", "9x9", "3", "--groups", "4"), "attributes.groups", "groups_divide_outputs"),
        (("1", "4", "6", "9x9", "11"), "attributes.padding", "filter_fits"),
        (("1", "4", "6", "9x9", "11", "--direction", "bwd_weight"), "attributes.padding", "filter_fits"),
        (("1", "4", "6", "9x9", "3x3x3"), "filter", "conv_arguments"),
        (("1", "4", "6", "9y9", "3"), "size", "conv_arguments"),
        (("0", "4", "6", "9x9", "3"), "n", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--dtype", "fp128"), "dtype", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--layout", "rcr"), "layout", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--direction", "up"), "direction", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--accumulate"), "accumulate", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--direction", "bwd_data", "--scale", "channel"), "scale", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--direction", "bwd_weight", "--bias"), "bias", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--transposed", "--d", "1"), "d", "conv_arguments"),
        (("1", "4", "6", "9x9", "3", "--dtype", "int8", "--direction", "bwd_data"), "dy.dtype", "dtype_direction"),
    ],
)
def test_what_cannot_be_meant_names_the_field_and_needs_no_server(arguments, field, rule, cli):
    ran = cli("run", "conv", *arguments, "--target", "unix:/nowhere")
    assert ran.code == (1 if rule == "dtype_direction" else 2), ran.err
    lines = dict(line.strip().split(":", 1) for line in ran.err.splitlines() if ": " in line)
    assert (lines["field"].strip(), lines["rule"].strip()) == (field, rule)
    assert lines["fix"]
    assert "Traceback" not in ran.err


def test_unknown_kernel_is_an_error_with_a_status_in_the_json(cli, target):
    ran = cli("run", "conv", 1, 8, 8, "9x9", "3", "--kernel", "nope", "--json", "--target", target)
    assert ran.code == 2
    assert (ran.json["status"], ran.json["error"]["code"]) == ("error", "not_found")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_explain_says_which_kernel_and_why(direction, cli, target):
    options = ("--direction", direction, "--padding", 1, "--target", target)
    found = cli("kernels", "explain", "conv", 2, 8, 12, "14x14", "3x3", *options, "--json")
    assert found.code == 0, found.err
    candidates = found.json["candidates"]
    assert candidates
    assert all(item["kernel"].startswith(DIRECTIONS[direction]) for item in candidates)
    ran = cli("kernels", "explain", "conv", 2, 8, 12, "14x14", "3x3", *options)
    assert "decided by" in ran.out
    assert candidates[0]["kernel"][:40] in ran.out


def test_a_case_is_the_problem_of_its_operation():
    command = installed_commands()["conv"]
    case = case_of(command, {"n": 1, "c": 2, "k": 2, "size": "4x4", "filter": "3", "direction": "bwd_weight"})
    loaded = load(command, case)
    assert (loaded.operation.name, loaded.problem.flops) == ("conv_backward_weight", case.flops)
    assert set(loaded.request.inputs) == {"x", "dy"}
