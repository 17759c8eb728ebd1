"""`tilewright kernels generate --operation conv`: the seeds' options, from rule sets to single values."""

from __future__ import annotations

import json

import pytest

OPERATIONS = ("conv", "conv_backward_data", "conv_backward_weight")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_are_written_with_what_describes_them(operation, cli, tmp_path):
    ran = cli("kernels", "generate", "--operation", operation, "-o", tmp_path, "--limit", 2, "--json")
    assert ran.code == 0, ran.err
    names = ran.json["kernels"]
    assert names
    assert not ran.json["failed"]
    described = json.loads((tmp_path / "kernels.json").read_text())
    assert [item["name"] for item in described["kernels"]] == names
    assert all((tmp_path / f"{name}.cpp").read_text().count("#include") for name in names)


@pytest.mark.parametrize(
    ("variant", "prefix"),
    [
        ("fwd", "grouped_conv_fwd_"), ("forward", "grouped_conv_fwd_"), ("2d_bwdd", "grouped_conv_bwd_data_"),
        ("bwd_data", "grouped_conv_bwd_data_"), ("bwdw", "grouped_conv_bwd_weight_"),
    ],
)  # fmt: skip
def test_a_variant_in_any_spelling_picks_the_operation(variant, prefix, cli):
    ran = cli("kernels", "generate", "--operation", "conv", "--variant", variant, "--list-configs", "--limit", 3)
    assert ran.code == 0, ran.err
    names = ran.out.split()
    assert names
    assert all(name.startswith(prefix) for name in names)


def test_an_unknown_variant_is_refused_with_those_that_there_are(cli):
    ran = cli("kernels", "generate", "--operation", "conv", "--variant", "sideways", "--list-configs")
    assert ran.code == 2
    assert "variant_known" in ran.err
    assert "bwdw" in ran.err


def test_writing_needs_a_folder(cli):
    ran = cli("kernels", "generate", "--operation", "conv")
    assert ran.code == 2
    assert "--list-configs" in ran.err


def test_options_that_an_operation_has_not_are_refused(cli):
    ran = cli("kernels", "generate", "--operation", "gemm", "--two-stage", "--list-configs")
    assert ran.code == 2
    assert "generate_options" in ran.err


def test_gemm_kernels_can_be_listed_too(cli):
    ran = cli("kernels", "generate", "--arch", "gfx942", "--list-configs", "--limit", 3, "--json")
    assert ran.code == 0, ran.err
    assert [item["name"].startswith("gemm_") for item in ran.json["kernels"]] == [True] * 3
    assert ran.json["arch"] == "gfx942"


@pytest.mark.parametrize("command", ["list", "export"])
def test_the_catalog_of_a_server_has_convolutions(command, cli, target):
    for operation in OPERATIONS:
        ran = cli("kernels", command, "--operation", operation, *(["--json"] if command == "list" else []),
                  "--target", target)  # fmt: skip
        assert ran.code == 0, ran.err
        kernels = ran.json["kernels"] if command == "export" else ran.json
        assert kernels
        assert all(item["name"].startswith("grouped_conv_") for item in kernels)
