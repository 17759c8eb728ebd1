"""`tilewright kernels generate --operation conv`: its options, from rule sets to single values."""

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
@pytest.mark.extended
def test_the_catalog_of_a_server_has_convolutions(command, cli, target):
    for operation in OPERATIONS:
        ran = cli("kernels", command, "--operation", operation, *(["--json"] if command == "list" else []),
                  "--target", target)  # fmt: skip
        assert ran.code == 0, ran.err
        kernels = ran.json["kernels"] if command == "export" else ran.json
        assert kernels
        assert all(item["name"].startswith("grouped_conv_") for item in kernels)


@pytest.mark.extended
def test_a_kernel_is_shown_and_built_by_its_name_alone(cli, target):
    (kernel,) = cli(
        "kernels", "list", "--operation", "conv_backward_data", "--limit", 1, "--json", "--target", target
    ).json
    ran = cli("kernels", "show", kernel["name"], "--target", target)
    assert ran.code == 0, ran.err
    assert "conv_backward_data" in ran.out or kernel["name"] in ran.out
    ran = cli("kernels", "build", kernel["name"], "--json", "--target", target)
    assert ran.code == 0, ran.err
    assert ran.json[0]["state"] in ("built", "cached")


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201", "sm_90a", "x86-64-v3"])
@pytest.mark.parametrize("rule_set", ["default", "tests", "tiny"])
def test_rule_sets_list_kernels_of_every_kind_of_device(rule_set, arch, cli):
    ran = cli("kernels", "generate", "--operation", "conv", "--variant", "bwdw", "--rule-set", rule_set, "--arch", arch,
              "--list-configs", "--limit", 5, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert 1 <= len(ran.json["kernels"]) <= 5
    assert all(item["name"].startswith("grouped_conv_bwd_weight_") for item in ran.json["kernels"])


@pytest.mark.parametrize(
    ("rule_set", "options", "field", "value"),
    [
        ("full", ("--ndim", 3), "ndim", 3),
        ("full", ("--datatype", "bf16"), "dtype_in", "bf16"),
        ("profiler", ("--two-stage",), "two_stage", True),
        ("profiler", ("--no-two-stage",), "two_stage", False),
        ("profiler", ("--pipeline", "compv3"), "pipeline", "compv3"),
    ],
)
def test_options_narrow_a_rule_set(rule_set, options, field, value, cli):
    ran = cli("kernels", "generate", "--operation", "conv_backward_weight", "--rule-set", rule_set, "--arch", "gfx942",
              *options, "--list-configs", "--limit", 8, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["kernels"]
    assert {item["config"][field] for item in ran.json["kernels"]} == {value}


def test_sizes_describe_a_kernel_of_their_own(cli, tmp_path):
    tile = [f"--{name}-{axis}={size}" for name, sizes in (("tile", (64, 64, 64)), ("warp", (4, 1, 1)),
            ("warp-tile", (16, 16, 16))) for axis, size in zip("mnk", sizes, strict=True)]  # fmt: skip
    ran = cli("kernels", "generate", "--operation", "conv", *tile, "--pipeline", "compv3", "--arch", "gfx942",
              "-o", tmp_path, "--verbose")  # fmt: skip
    assert ran.code == 0, ran.err
    (source,) = tmp_path.glob("*.hip")
    assert "_64x64x64_4x1x1_16x16x16" in source.name
    assert source.stem in ran.err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--preselected", "tiny", "--pipeline", "compv4"), "generate_sources"),
        (("--preselected", "tiny", "--tile-config-json", '{"tile_m": [64]}'), "generate_sources"),
        (("--tile-config-json", '{"tile_m": [64]}', "--rule-set", "tiny"), "generate_sources"),
        (("--operation", "attention", "--variants", "multi_d"), "generate_options"),
        (("--variants", "bwd_data"), "fix:   use --variant bwd_data"),
        (("--config", "nowhere.json"), "fix:   give a JSON file, JSON text, or - for standard input"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options, rule, cli):
    ran = cli("kernels", "generate", "--operation", "conv", "--arch", "gfx942", *options, "--list-configs")
    assert ran.code == 2
    assert rule in ran.err


def test_a_variant_of_another_direction_than_the_operation_is_refused(cli):
    ran = cli("kernels", "generate", "--operation", "conv_backward_data", "--variant", "fwd", "--list-configs")
    assert ran.code == 2
    assert "variant_operation" in ran.err


def test_a_set_without_kernels_for_an_architecture_names_those_that_it_has_some_for(cli):
    ran = cli("kernels", "generate", "--preselected", "fp16_rcr_essential", "--arch", "x86-64-v3", "--list-configs")
    assert ran.code == 1
    assert "there are for --arch gfx90a, gfx942, gfx950" in ran.err


def test_options_that_describe_one_kernel_say_how_to_choose_among_those_that_are_shipped(cli):
    options = ("--operation", "conv", "--arch", "gfx942", "--pipeline", "compv4", "--list-configs")
    assert "--rule-set default" in cli("kernels", "generate", *options).err
    assert "--rule-set" not in cli("kernels", "generate", *options, "--rule-set", "default").err
