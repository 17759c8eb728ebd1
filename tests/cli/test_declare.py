"""Kernels that users declare: registered, named, run, exported and imported."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import tilewright as tw
import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.rulebook import RULES


def valid(**fields):
    """The nearest configuration of fp32 products that is valid on this CPU."""
    chosen = {"dtype_a": "fp32", "pipeline": "compv3", "epilogue": "default", "wave": [1, 1, 1], **fields}
    return RULES.correct(GemmConfig.from_dict(chosen), tilewright_arch.detect_cpu()).config


KERNEL = valid(tile=[96, 128, 256])
NAME = KERNEL.name
OWN = KERNEL.to_dict()
FIELDS = {name: OWN[name] for name in ("pipeline", "epilogue", "tile", "wave", "warp_tile")}
DISPATCHER = {
    "metadata": {"registry_name": "default", "total_kernels": 1, "export_version": "1.0.0"},
    "kernels": [{
        "name": "anything", "identifier": "anything", "gfx_arch": "gfx942",
        "signature": {
            "dtype_a": "fp16", "dtype_b": "fp16", "dtype_c": "fp16", "dtype_acc": "fp32", "layout_a": "row_major",
            "layout_b": "col_major", "layout_c": "row_major", "transpose_a": False, "transpose_b": False,
            "grouped": False, "split_k": 1, "elementwise_op": "PassThrough", "num_d_tensors": 0,
            "structured_sparsity": False,
        },
        "algorithm": {
            "tile_shape": {"m": 128, "n": 128, "k": 32}, "wave_shape": {"m": 2, "n": 2, "k": 1},
            "warp_tile_shape": {"m": 32, "n": 32, "k": 16}, "pipeline": "compv4", "scheduler": "intrawave",
            "epilogue": "cshuffle", "block_size": 256, "double_buffer": True, "persistent": False,
            "preshuffle": False, "transpose_c": False, "num_wave_groups": 1,
        },
    }],
}  # fmt: skip
"""A registry as Composable Kernel's dispatcher exports it."""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """A cache that only these tests use: registered kernels lie in it."""
    return tmp_path_factory.mktemp("declare") / "cache"


@pytest.fixture(scope="module")
def target(own_target):
    return own_target


@pytest.fixture(scope="module")
def client(target):
    with tw.connect(target) as found:
        yield found


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(OWN))
    return path


@pytest.mark.extended
def test_a_built_configuration_has_a_name_that_run_explain_show_and_list_know(cli, target, own):
    built = cli("kernels", "build", "--config", own, "--retry-failed", "--json", "--target", target)
    assert built.code == 0, built.err
    assert [item["name"] for item in built.json] == [NAME]
    ran = cli("run", "gemm", 70, 50, 40, "--kernel", NAME, "--repeat", 1, "--validate", "--json", "--target", target)
    assert (ran.code, ran.json["kernel"], ran.json["status"]) == (0, NAME, "success"), ran.err
    why = cli("kernels", "explain", "gemm", 70, 50, 40, "--kernel", NAME, "--json", "--target", target).json
    assert why["chosen"].startswith(NAME)
    assert cli("kernels", "show", NAME, "--json", "--target", target).json["kernel"]["built"] is True
    listed = cli("kernels", "list", "--set", "registered", "--json", "--target", target).json
    assert NAME in [item["name"] for item in listed if item["registered"]]
    assert cli("kernels", "unregister", NAME, "--target", target).code == 0
    gone = cli("run", "gemm", 70, 50, 40, "--kernel", NAME, "--repeat", 1, "--target", target)
    assert (gone.code, "not_found" in gone.err) == (2, True)  # though it had a plan


def test_what_is_exported_can_be_imported_and_unregistered(cli, target, own, tmp_path):
    assert cli("kernels", "register", own, "--target", target).out.strip() == NAME
    catalog = tmp_path / "kernels.json"
    cli("kernels", "export", "--set", "registered", "--name", NAME, "-o", catalog, "--target", target)
    assert cli("kernels", "unregister", NAME, "--target", target).code == 0
    again = cli("kernels", "unregister", NAME, "--target", target)
    assert (again.code, "not_found" in again.err) == (2, True)
    imported = cli("kernels", "import", catalog, "--json", "--target", target)
    assert [(item["name"], item["state"]) for item in imported.json] == [(NAME, "registered")]
    assert cli("kernels", "unregister", NAME, "--target", target).code == 0


def test_the_registry_of_composable_kernels_dispatcher_is_imported(cli, target):
    found = cli("kernels", "import", json.dumps(DISPATCHER), "--json", "--target", target)
    assert found.code == 0, found.err
    (kernel,) = found.json
    assert kernel["arch"] == "gfx942"
    assert kernel["name"].startswith("gemm_fp16_rcr_compv4_cshuffle_intrawave_")
    config = cli("kernels", "show", kernel["name"], "--arch", "gfx942", "--json", "--target", target).json["config"]
    assert (config["tile"], config["block_size"], config["double_buffer"]) == ([128, 128, 32], 0, "on")


def test_import_names_the_entry_that_cannot_be_read_and_refuses_what_is_not_valid(cli, target):
    bad = cli("kernels", "import", json.dumps([OWN, {"tile": [1, 2, 3], "tail": 1}]), "--target", target)
    assert bad.code == 2
    assert "kernels[1]" in bad.err
    invalid = cli("kernels", "import", json.dumps([{**OWN, "warp_tile": [13, 31, 7]}]), "--json", "--target", target)
    assert (invalid.code, invalid.json[0]["state"]) == (1, "refused")


def test_a_configuration_that_several_operations_have_asks_for_the_option(cli, target):
    ran = cli("kernels", "build", "--config", json.dumps(FIELDS), "--target", target)
    assert ran.code == 2
    assert "add --operation" in ran.err
    named = cli("kernels", "validate", json.dumps(FIELDS), "--operation", "gemm", "--target", target)
    assert "gemm_fp16_rcr_compv3" in named.out


def test_run_takes_a_configuration_whose_signature_the_problem_adds(cli, target):
    given = json.dumps(FIELDS)
    ran = cli("run", "gemm", 70, 50, 40, "--config", given, "--repeat", 1, "--validate", "--json", "--target", target)
    assert (ran.code, ran.json["kernel"], ran.json["status"]) == (0, NAME, "success"), ran.err


def test_show_prints_a_configuration_that_can_be_handed_back(cli, target, own):
    cli("kernels", "register", own, "--target", target)
    printed = cli("kernels", "show", NAME, "--config", "--target", target).out
    assert cli("kernels", "validate", printed, "--target", target).out.startswith(f"valid: {NAME}")


def test_calls_and_plans_take_a_configuration(client):
    a, b = np.ones((9, 20), np.float32), np.ones((20, 7), np.float32)
    for launch in ("server", "auto"):
        assert (client.gemm(a, b, config=FIELDS, launch=launch) == 20).all()
        assert client.report.kernels == (NAME.replace("rcr", "rrr"),)
    assert (client.plan_gemm(a, b, config=FIELDS)(a, b) == 20).all()
    why = client.explain("gemm", {"a": a, "b": b}, config=FIELDS)
    assert why["chosen"].startswith(NAME.replace("rcr", "rrr"))


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [
        ({"config": 3}, tw.InvalidArgumentError, "config"),
        ({"config": {"tail": 1}}, tw.InvalidArgumentError, "config.tail"),
        ({"config": FIELDS, "kernel": NAME}, tw.InvalidArgumentError, "kernel"),
        ({"config": {**FIELDS, "pipeline": "compv9"}}, tw.ConfigInvalidError, "pipeline"),
        ({"config": {**FIELDS, "layout": "rcr"}}, tw.UnsupportedError, "layout"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused_by_field(client, given, kind, field):
    a = np.ones((8, 8), np.float32)
    with pytest.raises(kind) as caught:
        client.gemm(a, a, **given)
    assert caught.value.field == field


def test_a_kernel_of_a_session_is_listed_for_it_alone_and_ends_with_it(client, target):
    other = valid(tile=[48, 64, 256]).to_dict()
    with tw.connect(target) as mine:
        kernel = mine.kernels.register(other)
        assert kernel.registered
        assert kernel in mine.kernels.list("gemm", kernel_set="registered")
        assert kernel not in client.kernels.list("gemm", kernel_set="registered")
        a = np.ones((8, 8), np.float32)
        assert (mine.gemm(a, a.T, kernel=kernel.name) == 8).all()
    assert client.kernels.list("gemm", kernel_set="registered", name=kernel.name) == []


def test_a_kernel_that_was_refused_by_name_runs_once_it_is_registered(client):
    other = valid(tile=[24, 64, 256]).to_dict()
    name = client.kernels.validate("gemm", other).name
    a = np.ones((8, 8), np.float32)
    with pytest.raises(tw.NotFoundError):
        client.gemm(a, a.T, kernel=name)
    client.kernels.register(other)
    assert (client.gemm(a, a.T, kernel=name) == 8).all()


def test_a_damaged_file_of_a_registered_kernel_is_left_out(client, cache_dir):
    kernel = client.kernels.register(valid(tile=[72, 64, 512]).to_dict(), shared=True)
    (path,) = [item for item in (cache_dir / "registered").glob("*.json") if kernel.name in item.read_text()]
    path.write_text(path.read_text().replace("512", "256"))
    assert kernel.name not in [item.name for item in client.kernels.list("gemm", kernel_set="registered")]


@pytest.mark.extended
def test_kernels_are_not_shared_over_tcp(cache_dir):
    command = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--insecure", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--cache-dir", str(cache_dir)], stdout=subprocess.PIPE, text=True) as server:
        try:
            target = server.stdout.readline().split()[1]
            with tw.connect(target) as remote:
                with pytest.raises(tw.AccessError):
                    remote.kernels.register(OWN, shared=True)
                assert remote.kernels.register(OWN).name == NAME
        finally:
            server.terminate()
