"""Declarations expand to valid kernels only, in a fixed order, and quickly."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import toy

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.kernel_sets.declare import ANY, DeferredDeclarations, KernelSet, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import ConfigInvalidError, InvalidArgumentError

ToyConfig = toy.ToyConfig


def kernel_set(*declarations: Any, **members: Any) -> KernelSet[toy.ToyConfig]:
    return KernelSet("set", "", declarations, **{"choices": toy.choices, **members})


def test_values_lists_and_wildcards_expand_in_field_order(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig, vector=[4, 2], tile=ANY, dtype="fp16"))
    expected = [
        ToyConfig(dtype=DType.FP16, tile=(size, 1, 1), vector=vector)
        for size, vector in itertools.product((4096, 1024, 256), (4, 2))
    ]
    assert list(kernels.expand(arch, toy.RULES)) == expected


def test_both_spellings_of_the_wildcard_mean_the_same(arch: ArchSpec) -> None:
    one, other = (kernel_set(declare(ToyConfig, vector=any_, pipeline=any_)) for any_ in (ANY, "*"))
    assert one.expand(arch, toy.RULES) == other.expand(arch, toy.RULES) != ()


def test_a_tuple_may_have_wildcards_for_members(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig, tile=(ANY, 1, "*")))
    assert {config.tile for config in kernels.expand(arch, toy.RULES)} == {(4096, 1, 1), (1024, 1, 1), (256, 1, 1)}
    assert kernel_set(declare(ToyConfig, tile=(ANY, 2, 1))).expand(arch, toy.RULES) == ()


def test_nothing_invalid_and_nothing_twice_comes_out(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig, vector=[64, 4]), declare(ToyConfig, vector=ANY))
    expanded = kernels.expand(arch, toy.RULES)
    assert [config.vector for config in expanded] == [4, 8, 2, 1]


def test_flags_and_enumerations_need_no_choices(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig, dtype=ANY, streaming=ANY), choices=None)
    assert [(config.dtype.value, config.streaming) for config in kernels.expand(arch, toy.RULES)] == [
        ("fp32", False), ("fp32", True), ("fp16", False), ("fp16", True),
    ]  # fmt: skip


def test_deferred_declarations_are_a_sequence_made_once(arch: ArchSpec) -> None:
    calls: list[int] = []
    written = [declare(ToyConfig, vector=vector) for vector in (4, 2, 1)]

    def make() -> Iterator[Any]:
        calls.append(0)
        yield from written

    deferred = DeferredDeclarations(make)
    assert not calls
    assert deferred[1] is written[1] and deferred[-1] is written[-1] and deferred[1:] == tuple(written[1:])
    assert (len(deferred), list(deferred)) == (3, written)
    with pytest.raises(IndexError):
        deferred[3]
    one, other = (KernelSet("set", "", items, toy.choices) for items in (deferred, tuple(written)))
    assert one.expand(arch, toy.RULES) == other.expand(arch, toy.RULES) != ()
    assert one.merge(other).declarations == tuple(written)
    assert calls == [0]


def test_threads_share_deferred_declarations() -> None:
    deferred = DeferredDeclarations(lambda: (declare(ToyConfig, vector=vector) for vector in range(1, 400)))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: list(deferred), range(8)))
    assert all(len(items) == 399 and all(map(operator.is_, items, found[0])) for items in found)


def test_a_wildcard_that_nobody_can_fill_is_an_error(arch: ArchSpec) -> None:
    with pytest.raises(InvalidArgumentError, match="offers no values for 'vector'"):
        kernel_set(declare(ToyConfig, vector=ANY), choices=None).expand(arch, toy.RULES)


def test_choices_see_what_is_already_known(arch: ArchSpec) -> None:
    seen: list[Mapping[str, Any]] = []

    def choices(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Any:
        seen.append(dict(partial))
        return toy.choices(field, arch, partial)

    kernel_set(declare(ToyConfig, dtype="fp16", tile=ANY, vector=ANY, streaming=True), choices=choices).expand(
        arch, toy.RULES
    )
    known = {"dtype": DType.FP16, "pipeline": "mem", "streaming": True}
    assert seen[0] == known
    assert seen[1] == {**known, "tile": (4096, 1, 1)}


def test_what_was_written_out_but_is_invalid_is_an_error_if_strict_and_told_otherwise(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig, vector=3), declare(ToyConfig))
    with pytest.raises(ConfigInvalidError, match=r"'set' declares .* tile_is_whole_vectors: ") as caught:
        kernels.expand(arch, toy.RULES, strict=True)
    assert caught.value.field == "tile"
    assert kernels.expand(arch, toy.RULES) == (ToyConfig(),)
    [(config, violations)] = kernels.rejected(arch, toy.RULES)
    assert config.vector == 3
    assert [violation.rule for violation in violations] == ["tile_is_whole_vectors"]


def test_a_wildcard_is_never_an_error_if_strict(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig, dtype=ANY, vector=ANY))
    assert kernels.expand(arch, toy.RULES, strict=True) == kernels.expand(arch, toy.RULES)
    assert kernels.rejected(arch, toy.RULES)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"vectors": 1}, "config.vectors"),
        ({"vectors": ANY}, "config.vectors"),
        ({"vector": "4"}, "config.vector"),
        ({"vector": [4, "x"]}, "config.vector"),
        ({"dtype": "fp12"}, "config.dtype"),
        ({"tile": (1, 2)}, "config.tile"),
        ({"vector": (ANY, 1)}, "config.vector"),
    ],
)
def test_a_declaration_of_what_no_config_can_hold_is_refused_at_once(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        declare(ToyConfig, **fields)
    assert caught.value.field == field


def test_a_declaration_may_be_for_some_archs_only(arch: ArchSpec) -> None:
    kernels = kernel_set(declare(ToyConfig).on("gfx9*", "sm_*"), declare(ToyConfig, vector=2))
    assert kernels.expand(arch, toy.RULES) == (ToyConfig(vector=2),)
    assert ToyConfig() in kernels.expand(tilewright_arch.load("gfx942"), RuleBook([]))


def test_sets_merge_add_and_tag(arch: ArchSpec) -> None:
    one = kernel_set(declare(ToyConfig, vector=4)).tag("fast")
    other = dataclasses.replace(kernel_set(declare(ToyConfig, vector=2)), name="other")
    both = one + other
    assert both.name == "set+other"
    assert [config.vector for config in both.expand(arch, toy.RULES)] == [4, 2]
    assert [config.vector for config in both.tagged("fast").expand(arch, toy.RULES)] == [4]
    assert len((both + both).declarations) == 2
    with pytest.raises(ValueError, match="cannot be merged"):
        one.merge(dataclasses.replace(other, choices=None))


def large(prefilter: Any = None) -> KernelSet[toy.ToyConfig]:
    values = {"tile": [(64 * i, 1, 1) for i in range(1, 251)], "vector": list(range(1, 51)), "pipeline": ["mem", "x"]}
    return kernel_set(
        declare(ToyConfig, tile="*", vector="*", pipeline="*", dtype=[DType.FP32, DType.FP16]),
        choices=lambda field, arch, partial: values.get(field),
        prefilter=prefilter,
    )


def test_fifty_thousand_combinations_expand(arch: ArchSpec) -> None:
    expanded = large().expand(arch, toy.RULES)
    assert 1000 < len(set(expanded)) == len(expanded) < 50_000


@pytest.mark.extended
def test_a_prefilter_prunes_beginnings_and_changes_nothing_else(arch: ArchSpec) -> None:
    asked = 0

    def prefilter(partial: Mapping[str, Any], arch: ArchSpec) -> bool:
        nonlocal asked
        asked += 1
        return partial.get("pipeline", "mem") in arch.pipelines

    assert large(prefilter).expand(arch, toy.RULES) == large().expand(arch, toy.RULES)
    assert asked < 26_000  # half of the 50,000 leaves were never reached


def test_expansion_is_remembered_and_iteration_is_lazy(arch: ArchSpec) -> None:
    calls = 0

    def count(config: toy.ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
        nonlocal calls
        calls += 1
        yield from ()

    rules, kernels = RuleBook([count]), large()
    assert next(kernels.iterate(arch, rules)) is not None
    assert calls == 1
    assert kernels.expand(arch, rules) is kernels.expand(arch, rules)
