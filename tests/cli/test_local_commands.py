"""Commands that need no server: arch, plugins, doctor, cache, generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tilewright_arch


def test_arch_list_names_every_spec(cli):
    ran = cli("arch", "list", "--json")
    assert ran.code == 0
    assert [item["name"] for item in ran.json] == list(tilewright_arch.names())


def test_arch_list_can_be_narrowed_to_a_kind(cli):
    assert {item["kind"] for item in cli("arch", "list", "--kind", "hip", "--json").json} == {"hip"}


def test_arch_show_prints_the_limits(cli):
    assert cli("arch", "show", "gfx942", "--json").json["lds_bytes"] == 65536
    ran = cli("arch", "show", "gfx942")
    assert "lds_bytes" in ran.out
    assert "65536" in ran.out


def test_arch_detect_is_this_machines_level(cli):
    assert cli("arch", "detect", "--json").json["id"] == tilewright_arch.detect_cpu().id


def test_unknown_arch_is_a_usage_error_with_a_suggestion(cli):
    ran = cli("arch", "show", "gfx943")
    assert ran.code == 2
    assert "gfx942" in ran.err
    assert "Traceback" not in ran.err


def test_plugins_lists_our_own(cli):
    ran = cli("plugins", "--json")
    assert ran.code == 0
    found = {item["name"]: item for item in ran.json}
    assert "gemm" in found["gemm"]["operations"]
    assert found["cpu"]["devices"] == ["cpu"]


def test_doctor_finds_what_the_server_needs(cli):
    ran = cli("doctor", "--json")
    states = {item["topic"]: item["state"] for item in ran.json}
    assert states["python"] == states["cpu"] == states["compiler"] == states["cache"] == "ok"
    assert ran.code == 0


def test_doctor_says_how_to_get_a_missing_compiler(cli, monkeypatch):
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_server.build.toolchains.toolchain import CpuToolchain

    def nothing(_: object) -> str:
        raise ToolchainMissingError("no C++ compiler was found", fix="pip install ziglang")

    monkeypatch.setattr(CpuToolchain, "describe", nothing)
    ran = cli("doctor")
    assert ran.code == 4
    assert "no C++ compiler was found" in ran.out
    assert "Fix: pip install ziglang" in ran.out


def test_cache_of_a_new_folder_is_empty(cli, tmp_path):
    ran = cli("cache", "list", "--cache-dir", tmp_path / "new", "--json")
    assert (ran.code, ran.json) == (0, [])
    assert cli("cache", "verify", "--cache-dir", tmp_path / "new").code == 0


def test_cache_that_others_can_write_is_refused(cli, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    ran = cli("cache", "list", "--cache-dir", folder)
    assert ran.code == 2
    assert "permission_denied" in ran.err


@pytest.mark.parametrize("text", ["many", "5 parsecs", "-1d", ""])
def test_cache_prune_refuses_ages_that_it_cannot_read(text, cli, tmp_path):
    ran = cli("cache", "prune", "--max-age", text or "d", "--cache-dir", tmp_path / "new")
    assert ran.code == 2
    assert "max_age" in ran.err


def test_generate_writes_one_source_for_each_kernel_and_describes_them(cli, tmp_path):
    ran = cli(
        "kernels", "generate", "-o", tmp_path / "out", "--datatype", "bf16", "--layout", "rcr", "--limit", 3, "--json"
    )
    assert ran.code == 0
    names = ran.json["kernels"]
    assert len(names) == 3
    assert all(name.startswith("gemm_bf16_rcr") for name in names)
    for name in names:
        assert name in (tmp_path / "out" / f"{name}.cpp").read_text()
    catalog = json.loads((tmp_path / "out" / "kernels.json").read_text())
    assert catalog["metadata"]["total_kernels"] == 3


def test_generate_combines_lists_as_the_rules_allow(cli, tmp_path):
    lists = json.dumps({"tile_config": {"warp_tile_m": [14], "warp_tile_n": [32], "warp_tile_k": [1]}})
    ran = cli(
        "kernels", "generate", "-o", tmp_path, "--datatype", "fp32", "--gpu-target", "x86-64-v4",
        "--tile-config-json", lists, "--kernel-set", "mine", "--json",
    )  # fmt: skip
    assert ran.json["arch"] == "x86-64-v4"
    assert Path(ran.json["folder"]) == tmp_path / "mine"
    assert ran.code == (0 if ran.json["kernels"] else 1)


def test_generate_for_an_unknown_set_names_the_known_ones(cli, tmp_path):
    ran = cli("kernels", "generate", "-o", tmp_path, "--preselected", "nope")
    assert ran.code == 2
    assert "fp16_rcr_essential" in ran.err


def test_generate_can_print_the_tables_of_an_arch(cli, tmp_path):
    ran = cli("kernels", "generate", "-o", tmp_path, "--gpu-target", "gfx950", "--show-arch-info")
    assert ran.json["name"] == "gfx950"


def test_serve_refuses_a_wrong_setting_with_its_rule(process):
    ran = process("serve", "--queue-limit", "none")
    assert ran.code == 2
    assert "queue_limit" in ran.err
    assert "Traceback" not in ran.err


def test_serve_refuses_tcp_without_the_word(process):
    ran = process("serve", "--listen", "127.0.0.1:0")
    assert ran.code != 0
    assert "insecure" in ran.err


def test_doctor_says_why_no_compiler_for_amd_gpus_can_be_used(cli, monkeypatch):
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_server.build.toolchains.hip import HipToolchain
    from tilewright_tools.analysis.disassembly import Disassembler

    def nothing(_: object) -> str:
        raise ToolchainMissingError("no compiler", rule="toolchain", fix="install clang", log_tail="clang++: too old")

    monkeypatch.setattr(HipToolchain, "describe", nothing)
    monkeypatch.setattr(Disassembler, "find", nothing)
    ran = cli("doctor", "--json")
    found = {item["topic"]: item for item in ran.json}
    assert ran.code == 0, "the server works without"
    assert found["hip compiler"]["state"] == found["disassembler"]["state"] == "note"
    assert found["hip compiler"]["detail"] == "no compiler (clang++: too old)"
    assert found["hip compiler"]["fix"] == "install clang"


@pytest.fixture
def analysable() -> None:
    """What `kernels analyze` needs."""
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_server.build.toolchains.hip import HipToolchain
    from tilewright_tools.analysis.disassembly import Disassembler

    try:
        Disassembler().find()
        HipToolchain([]).identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("analysable")
@pytest.mark.extended
def test_analyze_tells_cycles_limit_and_bound(cli):
    config = json.dumps({"dtype_a": "fp16", "pipeline": "compv4", "tile": [128, 128, 32], "wave": [2, 2, 1]})
    ran = cli("kernels", "analyze", "--config", config, "--arch", "gfx942", "--shape", "1024,2048,4096", "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["loop"]["cycles"]["matrix"] > 0
    assert found["loop"]["limit"] in found["loop"]["cycles"]
    assert (found["problem"]["m"], found["problem"]["n"], found["problem"]["k"]) == (1024, 2048, 4096)
    assert 0 < found["bound"]["share_of_peak"] <= 1
    ran = cli("kernels", "analyze", "--config", config, "--arch", "gfx942", "--schedule")
    assert "static analysis, not measured" in ran.out
    assert "v_mfma_f32_" in ran.out


def test_analyze_says_what_is_wrong(cli):
    assert "say what to analyse" in cli("kernels", "analyze", "--arch", "gfx942").err
    assert "M,N,K" in cli("kernels", "analyze", "--config", "{}", "--arch", "gfx942", "--shape", "12").err
    ran = cli("kernels", "analyze", "--config", "{}", "--operation", "conv", "--arch", "gfx942", "--shape", "1,2,3")
    assert "N,C,K,HxW,RxS" in ran.err
    ran = cli("kernels", "analyze", "gemm_nonsense", "--arch", "gfx942")
    assert ran.code == 2
    assert "kernel_name" in ran.err
