"""Everything that operations fuse is an option of `run`, `explain` and `bench`; results are right."""

from __future__ import annotations

import pytest

from tilewright_kit.commands.discovery import installed_commands

FEATURES = (
    ("gemm", "33 47 65 --bias --d 2 --scale-a row --scale-b column --alpha 0.5 --clamp -1:6"),
    ("gemm", "64 48 96 --groups 33+0+7 --bias --d 1 --dtype bf16"),
    ("gemm", "64 48 96 --layout rrr --packed --split-k 2"),
    ("gemm", "64 48 96 --batch 3 --d 1 --binary MultiDMultiply"),
    ("conv", "1 16 8 9x9 4x4 --stride 2 --padding 1 --transposed --bias"),
    ("conv", "2 16 8 9x9 3x3 --padding 1 --d 1 --scale channel --clamp 0: --alpha 2"),
    ("attention", "2 4 33 64 --bias alibi --softcap 30 --sinks --dropout 0.2 --lse"),
    ("attention", "2 4 33 64 --bias yes --backward"),
    ("attention", "2 4 200 64 --queries 1 --splits 3 --scale 0.2"),
    ("attention", "2 4 64 64 --queries 3 --append --rope half --paged 16"),
    ("attention", "2 4 64 64 --queries 3 --append"),
    ("attention", "2 4 64 64 --dtype fp8 --descale"),
    (
        "moe",
        "40 48 160 --experts 3 --dtype fp8 --scale-block 1x128_128x128 --activation swiglu --out-scale-block 1x128",
    ),
)


@pytest.mark.some(4)
@pytest.mark.parametrize(("command", "options"), FEATURES)
@pytest.mark.extended
def test_every_feature_validates(command, options, cli, target):
    ran = cli("run", command, *options.split(), "--repeat", 1, "--validate", "--json", "--target", target)
    assert ran.code == 0, ran.err
    assert ran.json["status"] == "success"
    assert ran.json["validation"]["total_elements"] > 0


@pytest.mark.some(4)
@pytest.mark.parametrize(("command", "options"), FEATURES)
@pytest.mark.extended
def test_explain_takes_what_run_takes(command, options, cli, target):
    ran = cli("kernels", "explain", command, *options.split(), "--json", "--target", target)
    assert ran.code == 0, ran.err
    assert ran.json["candidates"]


def test_a_transposed_convolution_has_the_sizes_of_pytorchs(cli):
    command = installed_commands()["conv"]
    given = {"n": 1, "c": 6, "k": 4, "size": "7x5", "filter": "4x3", "stride": "2", "padding": "1", "transposed": True}
    request = command.case(given).request()
    assert request.operation == "conv_backward_data"
    assert request.inputs["dy"].shape == (1, 6, 7, 5)
    assert request.inputs["w"].shape == (6, 4, 4, 3)
    assert request.attributes["input_size"] == (14, 9)


@pytest.mark.extended
def test_sweeps_check_and_time_what_is_fused(cli, tmp_path):
    common = ("--limit", 2, "--repeat", 2, "--warmup", 1, "--cache-dir", tmp_path, "--json")
    options = ("--shapes", "48x40x64", "--dtype", "fp32", "--groups", "48+0+9", "--bias", "--clamp", ":6")
    ran = cli("bench", "gemm", *options, *common)
    assert ran.code == 0, ran.err
    (problem,) = ran.json["problems"]
    assert "48+0+9" in str(problem)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("gemm", 8, 8, 8, "--clamp", "6"), "clamp"),
        (("gemm", 8, 8, 8, "--clamp", "0:6", "--activation", "Relu"), "clamp"),
        (("gemm", 8, 8, 8, "--alpha", "much"), "alpha"),
        (("gemm", 8, 8, 8, "--binary", "MultiDMultiply"), "binary"),
        (("gemm", 8, 8, 8, "--groups", "8,8"), "groups"),
        (("gemm", 8, 8, 8, "--groups", "8+8", "--packed"), "packed"),
        (("conv", 1, 8, 8, "9x9", "3", "--direction", "bwd_data", "--transposed"), "direction"),
        (("moe", 8, 8, 8, "--scale-block", "1x128_1x128"), "scale_block"),
        (("moe", 8, 12, 8, "--activation", "swiglu"), "n"),
        (("attention", 1, 2, 8, 64, "--append", "--softcap", "3"), "softcap"),
        (("attention", 1, 2, 8, 64, "--backward", "--splits", "3"), "splits"),
        (("attention", 1, 2, 8, 64, "--rope", "half"), "rope"),
        (("attention", 1, 2, 8, 64, "--queries", "9", "--append"), "seq_q"),
    ],
)
def test_what_would_be_ignored_is_refused_without_a_server(arguments, field, cli):
    ran = cli("run", *arguments)
    assert ran.code == 2
    assert f"field: {field}" in ran.err


@pytest.mark.parametrize(
    ("line", "field", "fix"),
    [
        ("gemm 8 8 8 --clamp 6:0", "clamp", "0:6"),
        ("conv 1 8 8 9x9 3x3 --clamp 1:-1", "clamp", "-1:1"),
        ("attention 1 4 8 16 --descale", "descale", "--dtype fp8"),
        ("gemm 8 8 8 --out-dtype fp33", "out_dtype", "use fp32, fp16"),
        ("conv 1 8 8 9x9 3x3 --out-dtype fp33", "out_dtype", "use fp32, fp16"),
    ],
)
def test_steps_that_mean_nothing_are_refused_in_the_words_of_the_command_line(line, field, fix, cli):
    ran = cli("run", *line.split())
    assert ran.code == 2
    assert f"field: {field}" in ran.err and fix in ran.err
