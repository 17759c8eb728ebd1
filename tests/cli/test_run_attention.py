"""`tilewright run attention` and `explain attention`: right in every form, and errors that say what to do."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright_fmha.commands.command import COMMAND
from tilewright_kit.commands.discovery import installed_commands
from tilewright_tools.cli.problems.loading import case_of, load

FORMS = {
    "varlen": ("3", "4", "30", "32", "--varlen", "--mask", "bottom_right"),
    "paged": ("2", "4", "50", "32", "--heads-k", "2", "--queries", "1", "--paged", "16"),
    "latent": ("2", "4", "50", "48", "--heads-k", "1", "--queries", "1", "--paged", "16", "--hdim-v", "32", "--latent"),
    "backward": ("2", "4", "17", "32", "--causal", "--backward", "--heads-k", "2"),
    "rows first": ("2", "3", "17", "32", "--window", "5,2", "--layout", "bshd", "--queries", "9"),
}


@pytest.mark.extended
def test_json_has_the_fields_of_a_benchmark_helper(cli, target):
    ran = cli("run", "attention", 2, 4, 29, 32, "--heads-k", 2, "--queries", 17, "--validate", "--json",
              "--target", target)  # fmt: skip
    assert ran.code == 0, ran.err
    record = ran.json
    assert {name: record["problem"][name] for name in ("batch", "heads", "heads_k", "queries", "keys")} == {
        "batch": 2, "heads": 4, "heads_k": 2, "queries": 17, "keys": 29,
    }  # fmt: skip
    assert record["kernel"].startswith("fmha_fwd_fp32_")
    flops = 2 * 2 * 4 * 17 * 29 * 64
    assert record["execution"]["tflops"] == pytest.approx(flops / (record["execution"]["time_ms"] * 1e-3) / 1e12)
    assert record["execution"]["bytes_copied"] == 0
    assert record["validation"]["accuracy"] > 99
    assert record["status"] == "success"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some(3)
def test_every_form_validates(form, cli, target):
    ran = cli("run", "attention", *FORMS[form], "--repeat", 2, "--validate", "--json", "--target", target)
    assert ran.code == 0, ran.err
    count = 3 if form == "backward" else 1
    assert len(ran.json["kernels"]) >= count


@pytest.mark.extended
def test_a_table_is_for_people_and_explain_says_why(cli, target):
    arguments = (2, 4, 29, 32, "--heads-k", 2, "--queries", 17, "--target", target)
    ran = cli("run", "attention", *arguments, "--repeat", 2)
    assert ran.code == 0, ran.err
    for text in ("fwd 2x4/2x17/29x32 fp32", "GFLOP/s"):
        assert text in ran.out
    found = cli("kernels", "explain", "attention", *arguments, "--json")
    assert found.code == 0, found.err
    assert all(item["kernel"].startswith("fmha_fwd") for item in found.json["candidates"])
    assert "decided by" in cli("kernels", "explain", "attention", *arguments).out


def test_scores_that_nobody_sees_are_compared_as_numbers():
    case = COMMAND.case({"batch": 1, "heads": 1, "seq_k": 2, "hdim": 8, "scores": "masked"})
    found = COMMAND.compared(case, {}, "scores", np.array([[1.5, -np.inf], [0.25, 2.0]], np.float32))
    assert found.tolist() == [[1.5, -32.0], [0.25, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "field", "rule"),
    [
        (("0", "4", "9", "32"), "batch", "attention_arguments"),
        (("1", "4", "9", "32", "--dtype", "fp128"), "dtype", "attention_arguments"),
        (("1", "4", "9", "32", "--mask", "diagonal"), "mask", "attention_arguments"),
        (("1", "4", "9", "32", "--window", "5"), "window", "attention_arguments"),
        (("1", "4", "9", "32", "--sink-size", "3"), "sink_size", "attention_arguments"),
        (("1", "4", "9", "32", "--window", "3,1", "--mask", "bottom_right"), "window", "attention_arguments"),
        (("1", "4", "9", "32", "--layout", "sbhd"), "layout", "attention_arguments"),
        (("1", "4", "9", "32", "--backward", "--paged", "16"), "page", "attention_arguments"),
        (("1", "4", "9", "32", "--heads-k", "3"), "k.shape", "head_groups"),
        (("1", "4", "9", "1030"), "q.shape", "hdim_range"),
        (("1", "4", "9", "32", "--paged", "12"), "k.shape", "page_size_power"),
    ],
)
def test_what_cannot_be_meant_names_the_field_and_needs_no_server(arguments, field, rule, cli):
    ran = cli("run", "attention", *arguments, "--target", "unix:/nowhere")
    assert ran.code == 2, ran.err
    lines = dict(line.strip().split(":", 1) for line in ran.err.splitlines() if ": " in line)
    assert (lines["field"].strip(), lines["rule"].strip()) == (field, rule)
    assert lines["fix"]
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": True},
        {"mask": "bottom_right", "seq_q": 5},
        {"window": "3,1", "seq_q": 5},
        {"window": "3,0", "mask": "bottom_right", "seq_q": 4},
        {"backward": True, "heads_k": 2, "hdim_v": 16},
    ],
)
def test_flops_are_those_of_the_operation(fields):
    command = installed_commands()["attention"]
    case = case_of(command, {"batch": 2, "heads": 4, "seq_k": 9, "hdim": 32, **fields})
    assert case.flops == load(command, case).problem.flops
