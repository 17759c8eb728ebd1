"""`tilewright describe` says of each operation what its plugin declares."""

from __future__ import annotations

import json

import pytest

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.entry import run


def test_an_operation_is_described_with_operands_attributes_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "gemm"]) == Exit.OK
    text = capsys.readouterr().out
    assert text.startswith("# gemm") and "| `scale_a` |" in text and "| `clamp_lo` |" in text and "gemm(a: fp32" in text


def test_scripts_get_bounds_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "attention", "--json"]) == Exit.OK
    record = json.loads(capsys.readouterr().out)
    attributes = {item["name"]: item for item in record["attributes"]}
    assert attributes["page_size"]["highest"] == 1024
    assert attributes["mask"]["choices"] == ["no", "top_left", "bottom_right", "generic"]
    assert attributes["num_splits"]["default"] == 0
    assert {item["name"] for item in record["inputs"] if not item["optional"]} == {"q", "k"}
    assert attributes["head_dim_v"]["lowest"] == 0  # without v


def test_an_operation_that_there_is_not_is_answered_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["describe", "gem"]) == Exit.USAGE
    assert "conv_backward_data" in capsys.readouterr().err
