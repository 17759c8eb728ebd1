"""`tilewright kernels generate` for products: files as Composable Kernel's generator takes them, lists of kinds."""

from __future__ import annotations

import json

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
