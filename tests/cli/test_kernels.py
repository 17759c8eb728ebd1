"""`tilewright kernels` against a server."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """A cache that only these tests use: they list it, damage it and empty it."""
    return tmp_path_factory.mktemp("cli") / "cache"


@pytest.fixture(scope="module")
def target(own_target):
    return own_target


@pytest.fixture(scope="module")
def some_name(target):
    import tilewright

    with tilewright.connect(target) as client:
        return client.kernels.list("gemm", name="gemm_fp32_rcr_*", limit=1)[0].name


@pytest.mark.extended
def test_list_narrows_by_pattern(cli, target):
    found = cli("kernels", "list", "--name", "gemm_bf16_rcr*", "--limit", 20, "--json", "--target", target).json
    assert 0 < len(found) <= 20
    assert all(item["name"].startswith("gemm_bf16_rcr") for item in found)


def test_list_can_name_the_kernel_sets(cli, target):
    assert "default" in cli("kernels", "list", "--sets", "--target", target).out.split()


@pytest.mark.extended
def test_build_then_show_says_that_it_is_built(cli, target, some_name):
    ran = cli("kernels", "build", some_name, "--json", "--target", target)
    assert ran.code == 0, ran.err
    assert [(item["name"], item["state"] in ("built", "cached")) for item in ran.json] == [(some_name, True)]
    shown = cli("kernels", "show", some_name, "--json", "--target", target).json
    assert shown["kernel"]["built"] is True
    assert shown["config"]["dtype_a"] == "fp32"


def test_show_can_print_the_source_alone(cli, target, some_name):
    ran = cli("kernels", "show", some_name, "--source", "--target", target)
    assert "#include" in ran.out
    assert some_name in ran.out


def test_show_of_an_unknown_kernel_is_a_usage_error(cli, target):
    ran = cli("kernels", "show", "gemm_nope", "--target", target)
    assert ran.code == 2
    assert "not_found" in ran.err


def test_build_needs_to_know_what(cli, target):
    assert cli("kernels", "build", "--target", target).code == 2


@pytest.mark.extended
def test_validate_accepts_a_valid_configuration_from_standard_input(process, cli, target, some_name):
    config = cli("kernels", "show", some_name, "--json", "--target", target).json["config"]
    ran = process("kernels", "validate", "-", "--target", target, stdin=json.dumps(config))
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"valid: {some_name}")


def test_validate_names_rule_field_value_and_fix(cli, target, some_name, tmp_path):
    config = cli("kernels", "show", some_name, "--json", "--target", target).json["config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "warp_tile": [13, 31, 7]}))
    ran = cli("kernels", "validate", path, "--json", "--target", target)
    assert ran.code == 1
    assert ran.json["valid"] is False
    assert any(item["rule"] and item["field"] and item["reason"] for item in ran.json["violations"])


def test_correct_mends_what_validate_refuses(cli, target, some_name, tmp_path):
    config = cli("kernels", "show", some_name, "--json", "--target", target).json["config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "warp_tile": [13, 31, 7]}))
    ran = cli("kernels", "correct", path, "--json", "--target", target)
    assert ran.code == 0, ran.err
    path.write_text(json.dumps(ran.json["config"]))
    assert cli("kernels", "validate", path, "--target", target).code == 0


@pytest.mark.parametrize("text", ["{", "[1]", "/no/such/file.json"])
def test_configuration_that_cannot_be_read_is_a_usage_error(text, cli, target):
    ran = cli("kernels", "validate", text, "--target", target)
    assert ran.code == 2
    assert "field: config" in ran.err


@pytest.mark.extended
def test_explain_says_what_decided(cli, target):
    ran = cli("kernels", "explain", "gemm", 128, 256, 512, "--dtype", "bf16", "--json", "--target", target)
    assert ran.code == 0, ran.err
    assert ran.json["candidates"]
    table = cli("kernels", "explain", "gemm", 128, 256, 512, "--dtype", "bf16", "--top", 3, "--target", target)
    assert "decided by auto" in table.out
    assert len(table.out.splitlines()) == 1 + 3 + 3
    assert "no such device" in cli("kernels", "explain", "gemm", 8, 8, 8, "--device", "cuda:7", "--target", target).err


def test_export_is_the_catalog(cli, target, tmp_path):
    path = tmp_path / "kernels.json"
    ran = cli("kernels", "export", "--name", "gemm_fp32_rcr*", "--statistics", "-o", path, "--target", target)
    assert ran.code == 0, ran.err
    assert json.loads(path.read_text())["kernels"]


def test_cache_commands_see_what_the_server_built(cli, target, some_name, cache_dir, tmp_path):
    cli("kernels", "build", some_name, "--target", target)
    names = [item["name"] for item in cli("cache", "list", "--cache-dir", cache_dir, "--json").json]
    assert some_name in names
    assert cli("cache", "verify", "--cache-dir", cache_dir).code == 0
    archive = tmp_path / "kernels.tar.gz"
    assert cli("cache", "export", archive, "--cache-dir", cache_dir).code == 0
    assert f"{len(names)} kernels added" in cli("cache", "import", archive, "--cache-dir", tmp_path / "other").err
    assert len(cli("cache", "list", "--cache-dir", tmp_path / "other", "--json").json) == len(names)


def test_cache_verify_fails_on_a_damaged_entry_until_it_is_repaired(cli, target, some_name, cache_dir, tmp_path):
    cli("kernels", "build", some_name, "--target", target)
    archive, copy = tmp_path / "kernels.tar", tmp_path / "copy"
    cli("cache", "export", archive, "--cache-dir", cache_dir)
    cli("cache", "import", archive, "--cache-dir", copy)
    binary = next(copy.glob("objects/**/*.so"))
    binary.chmod(0o600)
    binary.write_bytes(binary.read_bytes()[:-1])
    assert cli("cache", "verify", "--cache-dir", copy).code == 1
    assert cli("cache", "verify", "--repair", "--cache-dir", copy).code == 0
    assert cli("cache", "verify", "--cache-dir", copy).code == 0


def test_cache_prune_all_empties_a_cache_that_nobody_uses(cli, target, some_name, cache_dir, tmp_path):
    cli("kernels", "build", some_name, "--target", target)
    archive, copy = tmp_path / "kernels.tar", tmp_path / "copy"
    cli("cache", "export", archive, "--cache-dir", cache_dir)
    cli("cache", "import", archive, "--cache-dir", copy)
    assert cli("cache", "prune", "--all", "--cache-dir", copy, "--json").json["kept"] == 0


def test_configurations_of_another_dispatcher_are_converted(cli, target):
    record = {
        "tile_config": {"tile_m": [64], "tile_n": [64], "tile_k": [64]},
        "trait_config": {"pipeline": ["compv3"]},
        "variant": "bwd_weight", "ndim_spatial": 2, "arch": "gfx942", "layout": "nhwgc", "dtype": "fp16",
    }  # fmt: skip
    options = ("--operation", "conv", "--arch", "gfx942", "--json", "--target", target)
    found = cli("kernels", "validate", json.dumps(record), *options)
    assert found.json["name"].startswith("grouped_conv_bwd_weight_fp16_nhwgc_2d_compv3")
    corrected = cli("kernels", "correct", json.dumps(record), *options)
    assert corrected.json["config"]["dtype_in"] == "fp16"
