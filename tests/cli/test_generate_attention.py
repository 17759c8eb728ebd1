"""`tilewright kernels generate --operation attention`: receipts, profiles and single values."""

from __future__ import annotations

import json


def test_kernels_are_written_with_what_describes_them(cli, tmp_path):
    ran = cli("kernels", "generate", "--operation", "attention", "-o", tmp_path, "--receipt", 4, "--limit", 3, "--json")
    assert ran.code == 0, ran.err
    names = ran.json["kernels"]
    assert len(names) == 3
    assert not ran.json["failed"]
    described = json.loads((tmp_path / "kernels.json").read_text())
    assert [item["name"] for item in described["kernels"]] == names
    assert all("TW_FMHA_FORWARD" in (tmp_path / f"{name}.cpp").read_text() for name in names)


def test_options_describe_a_kernel(cli):
    options = ("--hdim", 128, "-d", "bf16", "--mask", "causal", "--lse", "--arch", "x86-64-v3")
    ran = cli("kernels", "generate", "--operation", "attention", *options, "--list-configs")
    assert ran.code == 0, ran.err
    (name,) = ran.out.split()
    assert name.startswith("fmha_fwd_bf16_batch_vr_h128x128_qr_")
    assert name.endswith("_maskcausal_lse")


def test_a_profile_and_heads_choose_among_kernels(cli):
    options = ("--profile", "flash_fwd", "--hdim", 64, "--mode", "group", "--arch", "x86-64-v3")
    ran = cli("kernels", "generate", "--operation", "attention", *options, "--list-configs")
    assert ran.code == 0, ran.err
    names = ran.out.split()
    assert names
    assert all("_group_vr_h64x64_" in name for name in names)
    assert all(name.endswith("_rc2") for name in names if "-combine_" not in name)


def test_a_variant_or_family_picks_the_operation(cli):
    arch = ("--arch", "x86-64-v3", "--list-configs")
    backward = cli("kernels", "generate", "--operation", "attention", "--variant", "bwd", "--rule-set", "tests", *arch)
    assert backward.code == 0, backward.err
    assert all(name.startswith("fmha_grad_") for name in backward.out.split())
    append = cli("kernels", "generate", "--operation", "kv_append", "--rule-set", "tiny", *arch)
    assert append.code == 0, append.err
    assert all(name.startswith("fmha_cache_") for name in append.out.split())


def test_waves_and_matrix_instructions_choose_among_kernels(cli):
    options = ("--rule-set", "default", "--wave", "4x1x1", "--warp-tile", "16x*x4", "--arch", "sm_90a")
    ran = cli("kernels", "generate", "--operation", "attention", *options, "--list-configs")
    assert ran.code == 0, ran.err
    names = ran.out.split()
    assert names
    assert all("_4x1x1x4x1x1x1x1x1_16x8x4x" in name for name in names)


def test_features_choose_among_kernels(cli):
    def names(operation, *options):
        ran = cli("kernels", "generate", "--operation", operation, "--rule-set", "default", *options, "--list-configs")
        assert ran.code == 0, ran.err
        assert ran.out.split()
        return ran.out.split()

    arch = ("--arch", "sm_90a")
    assert all("_rope" in name for name in names("kv_append", "--rope", "half_rotated", *arch))
    assert all("_qspertensor" in name for name in names("attention", "--qscale", "pertensor", *arch))
    assert all("_sink" in name for name in names("attention", "--sink", *arch))
    sinks, none = (names("attention", option, *arch) for option in ("--learned-sinks", "--no-learned-sinks"))
    assert all("_lsink" in name for name in sinks)
    assert not any("_lsink" in name for name in none)


def test_malformed_numbers_are_refused_with_a_form_that_is_not(cli):
    for text in ("4x1xfour", "4x1x1x4x1x1x1x1x1x1", "4,1,1"):
        ran = cli("kernels", "generate", "--operation", "attention", "--wave", text, "--list-configs")
        assert ran.code == 2
        assert "numbers_joined" in ran.err and "4x1x1x4x1x1" in ran.err


def test_unknown_receipts_and_options_are_refused(cli):
    unknown = cli("kernels", "generate", "--operation", "attention", "--profile", "nobody", "--list-configs")
    assert unknown.code == 2
    assert "known_name" in unknown.err and "pytorch" in unknown.err
    foreign = cli("kernels", "generate", "--operation", "conv", "--hdim", 64, "--list-configs")
    assert foreign.code == 2
    assert "generate_options" in foreign.err
