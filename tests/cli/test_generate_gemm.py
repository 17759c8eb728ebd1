"""`tilewright kernels generate` for products: files as Composable Kernel's generator takes them, lists of kinds."""

from __future__ import annotations

import json

import pytest

TILES = {
    "tile_config": {
        "tile_m": [128], "tile_n": [128], "tile_k": [32], "warp_m": [2], "warp_n": [2], "warp_k": [1],
        "warp_tile_m": [32], "warp_tile_n": [32], "warp_tile_k": [16],
    },
    "trait_config": {
        "pipeline": ["compv4"], "epilogue": ["cshuffle"], "scheduler": ["intrawave"],
        "pad_m": [False], "pad_n": [False], "pad_k": [False], "persistent": [False],
    },
}  # fmt: skip
LISTED = (
    "kernels",
    "generate",
    "--arch",
    "gfx942",
    "--datatype",
    "fp16",
    "--layout",
    "rcr",
    "--list-configs",
    "--json",
)


def test_files_combine_operands_d(cli, tmp_path):
    file = tmp_path / "config.json"
    operands = {"elementwise_ops": ["MultiDAdd", "MultiDMultiply"], "num_d_tensors": [1, 2]}
    file.write_text(json.dumps(TILES | {"multi_d_config": operands}))
    ran = cli(*LISTED, "--config", file)
    assert ran.code == 0, ran.err
    found = {(item["config"]["binary"], item["config"]["num_d_tensors"]) for item in ran.json["kernels"]}
    assert found == {(op, count) for op in operands["elementwise_ops"] for count in (1, 2)}


def test_one_option_takes_several_kinds(cli):
    several = cli(*LISTED, "--variants", "batched", "grouped", "--limit", "50")
    assert several.code == 0, several.err
    apart = cli(*LISTED, "--variants", "batched", "--variants", "grouped", "--limit", "50")
    assert several.json == apart.json
    kinds = {(item["config"]["batched"], item["config"]["grouped"]) for item in several.json["kernels"]}
    assert kinds == {(True, False), (False, True)}


def listed(cli, record, *more):
    return cli(
        "kernels", "generate", "--arch", "gfx942", "--list-configs", "--json", "--config", json.dumps(record), *more
    )


def test_a_whole_configuration_stands_for_itself(cli):
    (one,) = listed(cli, TILES).json["kernels"]
    assert isinstance(one["config"]["tile"], list)
    (same,) = listed(cli, one["config"]).json["kernels"]
    assert same == one
    two = listed(cli, one["config"] | {"tile": [[128, 128, 32], [256, 128, 32]]}).json["kernels"]
    assert [item["config"]["tile"] for item in two] == [[128, 128, 32], [256, 128, 32]]


def test_lists_are_written_as_values_or_as_a_range(cli):
    wanted = [64, 128, 192, 256]
    for values in (wanted, {"values": wanted}, {"min": 64, "max": 256, "step": 64}):
        found = listed(cli, {"tile_config": {"tile_m": values}}).json["kernels"]
        assert [item["config"]["tile"][0] for item in found] == wanted
    for values in ({"min": 64}, {"min": 64, "max": 256, "step": 0}, {"values": 64}):
        ran = listed(cli, {"tile_m": values})
        assert (ran.code, ran.out) == (2, "")
        assert "generate_lists" in ran.err


def test_tiles_of_more_than_three_numbers_are_given_whole(cli):
    """Axes of one alone ended in a traceback once."""
    ran = listed(cli, {"tile_m": [128]}, "--operation", "attention")
    assert ran.code == 2
    assert "generate_lists" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.extended
def test_kinds_that_nobody_knows_are_told_from_those_that_there_are(cli):
    ran = cli("kernels", "generate", "--arch", "gfx942", "--variants", "nonsense", "--list-configs")
    assert ran.code == 2
    assert "batched, grouped, multi_d, preshuffle, standard, stream_k" in ran.err
    assert "no such kernel" not in ran.err, "it was refused before any set was made"
    ran = cli("kernels", "generate", "--arch", "gfx942", "--operation", "conv", "--streamk-enabled",
              "--rule-set", "full", "--list-configs")  # fmt: skip
    assert ran.code == 1
    assert "without --rule-set" in ran.err
    ran = cli("kernels", "generate", "--arch", "gfx942", "--operation", "conv", "--streamk-enabled", "--list-configs")
    assert ran.code == 1
    assert "stream_k_template" in ran.err
