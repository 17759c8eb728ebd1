"""`tilewright run gemm`: right results, stable JSON, and errors that say what to do."""

from __future__ import annotations

import pytest

from tilewright_kit.commands.cases import DTYPES
from tilewright_kit.commands.discovery import installed_commands
from tilewright_tools.cli.problems import checks

LAYOUTS = ("rcr", "rrr", "crr", "ccr")
ACTIVATIONS = next(item.words for item in installed_commands()["gemm"].steps if item.name == "activation")


@pytest.mark.extended
def test_json_has_the_fields_of_a_benchmark_helper(cli, target):
    ran = cli("run", "gemm", 65, 33, 47, "--validate", "--json", "--target", target)
    assert ran.code == 0, ran.err
    record = ran.json
    assert {name: record["problem"][name] for name in "MNK"} == {"M": 65, "N": 33, "K": 47}
    assert record["kernel"].startswith("gemm_fp32_rcr_")
    assert record["execution"]["time_ms"] > 0
    expected = 2 * 65 * 33 * 47 / (record["execution"]["time_ms"] * 1e-3) / 1e12
    assert record["execution"]["tflops"] == pytest.approx(expected)
    assert record["validation"]["accuracy"] == 100
    assert record["status"] == "success"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.some(4)
def test_every_dtype_validates(dtype, cli, target):
    layout = LAYOUTS[list(DTYPES).index(dtype) % 4]
    ran = cli(
        "run", "gemm", 37, 41, 59, "--dtype", dtype, "--layout", layout, "--validate", "--json", "--target", target
    )
    assert ran.code == 0, ran.err
    assert ran.json["status"] == "success"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.some(4)
def test_activations_validate(activation, cli, target):
    ran = cli("run", "gemm", 20, 30, 40, "--activation", activation, "--validate", "--json", "--target", target)
    assert ran.code == 0, ran.err


def test_batches_and_output_types_validate(cli, target):
    options = ("--batch", 5, "--dtype", "bf16", "--out-dtype", "fp32", "--repeat", 3)
    ran = cli("run", "gemm", 17, 19, 23, *options, "--validate", "--json", "--target", target)
    assert ran.code == 0, ran.err
    assert ran.json["problem"]["batch"] == 5
    assert ran.json["validation"]["total_elements"] == 5 * 17 * 19


def test_kernel_can_be_named(cli, target):
    name = cli("run", "gemm", 64, 64, 64, "--json", "--target", target).json["kernel"]
    ran = cli("run", "gemm", 64, 64, 64, "--kernel", name, "--json", "--target", target)
    assert ran.json["kernel"] == name


def test_device_can_be_named(cli, target):
    assert cli("run", "gemm", 64, 64, 64, "--device", "cpu:0", "--json", "--target", target).json["device"] == "cpu:0"
    ran = cli("run", "gemm", 64, 64, 64, "--device", "cuda:7", "--json", "--target", target)
    assert ran.code != 0
    assert ran.json["error"]["code"] == "not_found"


def test_operands_in_shared_memory_are_not_copied(cli, target):
    assert cli("run", "gemm", 512, 512, 512, "--json", "--target", target).json["execution"]["bytes_copied"] == 0


def test_table_is_for_people(cli, target):
    ran = cli("run", "gemm", 64, 64, 64, "--validate", "--target", target)
    assert "GFLOP/s" in ran.out
    assert "success" in ran.out


@pytest.mark.extended
def test_an_unknown_strategy_is_answered_with_those_that_there_are(cli, target):
    ran = cli("run", "gemm", 8, 8, 8, "--strategy", "nonsense", "--target", target)
    assert ran.code == 2
    assert "heuristic" in ran.err and "first_fit" in ran.err and "fix:" in ran.err


def test_unknown_kernel_is_an_error_with_a_status_in_the_json(cli, target):
    ran = cli("run", "gemm", 64, 64, 64, "--kernel", "nope", "--json", "--target", target)
    assert ran.code == 2
    assert ran.json["status"] == "error"
    assert ran.json["error"]["code"] == "not_found"
    assert "error:" in ran.err


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("0", "1", "1"), "m"),
        (("1", "1", "1", "--dtype", "fp128"), "dtype"),
        (("1", "1", "1", "--layout", "rrc"), "layout"),
    ],
)
def test_wrong_problem_is_a_usage_error_that_names_the_field(options, field, cli):
    ran = cli("run", "gemm", *options)
    assert ran.code == 2
    assert f"field: {field}" in ran.err
    assert "Traceback" not in ran.err


def test_no_server_at_the_target_is_unavailable(cli, tmp_path):
    ran = cli("run", "gemm", 8, 8, 8, "--target", f"unix:{tmp_path}/none.sock")
    assert ran.code == 3
    assert "unavailable" in ran.err


@pytest.mark.extended
def test_without_a_server_one_is_started_and_ended(process, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where no server of the user listens
    monkeypatch.delenv("TILEWRIGHT_TARGET", raising=False)
    ran = process("run", "gemm", 16, 16, 16, "--validate", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["status"] == "success"


def test_check_refuses_nan_and_small_errors_alike():
    import numpy as np

    truth = np.ones((64, 64))
    spoiled = truth.astype(np.float32)
    assert checks.check(spoiled, truth, 64).ok
    spoiled[3, 5] = np.nan
    assert not checks.check(spoiled, truth, 64).ok
    spoiled[3, 5] = 1.01
    assert not checks.check(spoiled, truth, 64).ok
