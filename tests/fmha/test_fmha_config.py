"""Configurations: names, identity, and what the fields mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fmha_configs import AMD, CPU, valid

import tilewright_arch
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import (
    ADVICE_FIELDS,
    CONFIGS,
    FLAGS,
    SIGNATURE_FIELDS,
    AttentionConfig,
    FmhaConfig,
    config_of,
)
from tilewright_fmha.pipelines.algorithms import completed
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plugin import tilewright_operations
from tilewright_fmha.vocabulary import FAMILY_OPERATIONS, Family, FmhaDType, MaskKind, SmallType
from tilewright_kit.config.naming import require_naming
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.kernel_sets.declare import ANY, KernelSet, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError


@pytest.mark.parametrize("kind", CONFIGS.values(), ids=lambda kind: kind.operation)
def test_names_are_functions_of_all_fields(kind: type[FmhaConfig]) -> None:
    require_naming(kind)
    plain = kind()
    names = {plain.name}
    for item in dataclasses.fields(kind):
        value = getattr(plain, item.name)
        other: object
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, int):
            other = value + 3
        elif isinstance(value, tuple):
            other = (*value[:-1], (value or (0,))[-1] + 8)
        elif type(value) is str:
            other = value + "x"
        else:
            other = next(member for member in type(value) if member != value)  # type: ignore[arg-type,var-annotated]
        changed = plain.replace(**{item.name: other})
        assert changed.name not in names, item.name
        names.add(changed.name)
        assert changed.key("x").digest != plain.key("x").digest
        assert kind.from_dict(changed.to_dict()) == changed


@pytest.mark.parametrize("name", tilewright_arch.names())
@pytest.mark.parametrize("operation", tilewright_operations(), ids=lambda operation: operation.name)
def test_a_bare_configuration_is_valid_wherever_there_are_kernels(operation: Any, name: str) -> None:
    arch, bare = tilewright_arch.load(name), operation.config_type()
    assert attention_of(arch) is not None  # all archs that there are have kernels of attention
    operation.rules.require(bare, arch)
    assert operation.rules.correct(bare, arch).config == bare
    built = completed(bare, arch)
    assert built.signature() == bare.replace(deterministic=built.deterministic).signature()
    assert RULES.allows(built, arch)
    unit = operation.generate(bare, arch)
    assert unit.name == bare.name != built.name
    assert f"m0 = {built.m0}, n0 = {built.n0}" in unit.text


def test_what_a_configuration_says_of_its_algorithm_is_kept() -> None:
    arch = tilewright_arch.load("x86-64-v3")
    said = AttentionConfig(wave=(2, *(1,) * 8), dtype=FmhaDType.FP32)
    built = completed(said, arch)
    assert built.wave == said.wave and built.tile and built.warp_tile and built.pipeline == "qr"
    rules = tilewright_operations()[0].rules
    assert rules.allows(said, arch)
    assert not rules.allows(said.replace(tile=(1, 2, 3)), arch)
    corrected = rules.correct(said.replace(hdim=(60, 64)), arch)
    assert corrected.is_valid and corrected.config.hdim == (64, 64) and corrected.config.wave == said.wave


def test_the_operations_have_names_of_their_own() -> None:
    prefixes = {kind.prefix for kind in CONFIGS.values()}
    assert prefixes == {"fmha", "fmha_grad", "fmha_cache"}
    for family, operation in FAMILY_OPERATIONS.items():
        assert config_of(family).operation == operation


def test_every_field_is_of_the_signature_or_the_algorithm() -> None:
    config = valid(CPU)
    fields = set(config.field_names())
    assert set(SIGNATURE_FIELDS) <= fields and set(ADVICE_FIELDS) <= fields and set(FLAGS) <= set(SIGNATURE_FIELDS)
    assert set(config.signature()) == set(SIGNATURE_FIELDS)
    assert set(config.signature()) | set(config.algorithm()) == fields


def test_a_name_tells_what_the_kernel_is() -> None:
    config = valid(AMD, dtype=FmhaDType.FP16, hdim=(128, 128), mask=MaskKind.CAUSAL, lse=True, pad_s=False)
    assert config.name.startswith("fmha_fwd_fp16_batch_vr_h128x128_qr-async_")
    assert config.name.endswith("_maskcausal_lse_padsoff")


def test_element_types_follow_from_the_word() -> None:
    config = valid(CPU, dtype=FmhaDType.FP16FP8)
    assert (config.q, config.kv, config.o, config.p) == (DType.FP16, DType.FP8, DType.FP16, DType.FP16)
    eight = config.replace(dtype=FmhaDType.FP8BF16)
    assert (eight.q, eight.kv, eight.o, eight.p) == (DType.FP8, DType.FP8, DType.BF16, DType.FP8)
    assert config.bias_type == config.rope_type == DType.FP32
    biased = config.replace(bias=type(config.bias).ELEMENTWISE, rope=type(config.rope).HALF)
    assert biased.bias_type == biased.rope_type == DType.FP16
    assert biased.replace(dtype_bias=SmallType.FP32).bias_type == DType.FP32


def test_a_record_with_an_unknown_field_or_word_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no field 'colour'"):
        config_of(Family.FWD).from_dict({"colour": "red"})
    with pytest.raises(InvalidArgumentError, match="diagonal"):
        config_of(Family.FWD).from_dict({"mask": "diagonal"})


def test_a_declaration_with_wildcards_is_found_among_what_the_arch_offers() -> None:
    from tilewright_fmha.pipelines.choices import offered
    from tilewright_fmha.pipelines.rulebook import SHAPE_RULES

    declared = declare(
        config_of(Family.FWD),
        dtype=FmhaDType.BF16,
        hdim=(128, 128),
        pipeline=["qr", "qr_async"],
        tile=(64, ANY, ANY, 128, ANY, 128),
        wave=(4, 1, 1, 4, 1, 1, 1, 1, 1),
        warp_tile=ANY,
    )
    found = KernelSet("mine", "", (declared,), offered).expand(AMD, RuleBook(SHAPE_RULES))
    assert found and {config.m0 for config in found} == {64} and {config.wave[0] for config in found} == {4}
