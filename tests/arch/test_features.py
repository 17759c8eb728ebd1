"""Optional features: what they change, and that they compose in any order."""

from __future__ import annotations

import pytest

import tilewright_arch as arch

SHAPES = [(14, 32), (12, 32), (8, 48), (6, 64), (8, 32), (4, 64), (1, 64), (24, 16), (16, 16)]


def test_load_accepts_features_in_any_order() -> None:
    spec = arch.load("x86-64-v4+vnni+bf16")
    assert spec.id == "x86-64-v4+bf16+vnni"
    assert spec == arch.load("x86-64-v4+bf16+vnni")
    assert spec == arch.load("x86-64-v4").with_features(["vnni"]).with_features(["bf16"])
    assert spec.with_features(["bf16"]) == spec
    assert arch.load(spec.id) == spec


def test_bf16_deepens_bf16_and_offers_both_depths_to_8_bit_floats() -> None:
    spec = arch.load("x86-64-v4+bf16")
    assert list(spec.warp_tiles["bf16_bf16_fp32"]) == [(m, n, 2) for m, n in SHAPES]
    both = [(m, n, k) for k in (2, 1) for m, n in SHAPES]
    for key in ("fp8_fp8_fp32", "fp8_bf8_fp32", "bf8_fp8_fp32", "bf8_bf8_fp32"):
        assert list(spec.warp_tiles[key]) == both
    for key in ("fp32_fp32_fp32", "fp16_fp16_fp32", "int8_int8_int32"):
        assert spec.warp_tiles[key] == arch.load("x86-64-v4").warp_tiles[key]
    assert spec.preshuffle_warp_tiles == spec.warp_tiles


def test_vnni_deepens_int8_only() -> None:
    spec = arch.load("x86-64-v4+vnni")
    base = arch.load("x86-64-v4")
    assert list(spec.warp_tiles["int8_int8_int32"]) == [(m, n, 4) for m, n in SHAPES]
    changed = {key for key in spec.warp_tiles if spec.warp_tiles[key] != base.warp_tiles[key]}
    assert changed == {"int8_int8_int32"}


def test_features_add_compiler_flags_and_rates() -> None:
    spec = arch.load("x86-64-v4+bf16+vnni")
    assert spec.toolchain.flags == ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
    rates = spec.throughput.flops_per_cycle_per_unit
    assert (rates["fp32"], rates["bf16"], rates["int8"]) == (64, 128, 256)
    assert arch.load("x86-64-v4").toolchain.flags == ("-march=x86-64-v4",)


def test_zig_gets_its_own_spelling_of_the_level() -> None:
    toolchain = arch.load("x86-64-v4+bf16").toolchain
    assert toolchain.zig_flags == ("-mcpu=x86_64_v4", "-mavx512bf16")
    assert arch.load("aarch64").toolchain.zig_flags == ("-mcpu=generic",)
    assert arch.load("gfx942").toolchain.zig_flags == arch.load("gfx942").toolchain.flags


def test_the_instruction_tells_the_depths_apart() -> None:
    spec = arch.load("x86-64-v4+bf16")
    shallow = spec.instruction("fp8_fp8_fp32", (6, 64, 1))
    deep = spec.instruction("fp8_fp8_fp32", (6, 64, 2))
    assert shallow is not None and deep is not None
    assert (shallow.name, deep.name) == ("fp32", "bf16_dot")


def test_an_unknown_feature_is_a_typed_error() -> None:
    with pytest.raises(arch.UnknownFeatureError, match="did you mean 'vnni'") as caught:
        arch.load("x86-64-v4+vnnni")
    assert caught.value.known == ("bf16", "vnni")
    with pytest.raises(arch.UnknownFeatureError):
        arch.load("x86-64-v3").with_features(["bf16"])


def test_an_unknown_arch_is_a_typed_error_with_a_close_match() -> None:
    with pytest.raises(arch.UnknownArchError, match="did you mean 'gfx942'") as caught:
        arch.load("gfx943")
    assert isinstance(caught.value, ValueError)
    assert caught.value.name == "gfx943"
    assert caught.value.known == arch.names()


def test_a_path_is_not_a_name() -> None:
    for name in ("../schema", "common/cpu", "", "+bf16"):
        with pytest.raises(arch.UnknownArchError):
            arch.load(name)
