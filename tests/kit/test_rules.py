"""Rules say what is wrong, and correction always ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import RuleBook, Violation, rule_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import ConfigInvalidError

ARCH = tilewright_arch.load("x86-64-v3")
configs = st.builds(
    toy.ToyConfig,
    dtype=st.sampled_from(DType),
    pipeline=st.sampled_from(["mem", "compv3", "no such"]),
    tile=st.tuples(*[st.integers(-5, 100_000)] * 3),
    vector=st.integers(-5, 200),
    streaming=st.booleans(),
)


@given(configs)
def test_correction_ends_in_a_valid_configuration_or_with_reasons(config: toy.ToyConfig) -> None:
    result = toy.RULES.correct(config, ARCH)
    assert result.remaining == toy.RULES.check(result.config, ARCH)
    assert result.is_valid == toy.RULES.allows(result.config, ARCH)
    assert all(violation.reason for violation in result.remaining)
    assert result.changed == (result.config != config)


@given(configs)
def test_check_allows_and_require_agree(config: toy.ToyConfig) -> None:
    violations = toy.RULES.check(config, ARCH)
    assert toy.RULES.allows(config, ARCH) == (not violations)
    if violations:
        with pytest.raises(ConfigInvalidError) as caught:
            toy.RULES.require(config, ARCH)
        assert caught.value.violations == violations


def test_fixes_that_chase_one_another_end() -> None:
    def odd(config: toy.ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
        if config.vector % 2 == 0:
            yield Violation("odd", "vector", config.vector, "even", {"vector": config.vector + 1})

    def even(config: toy.ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
        if config.vector % 2:
            yield Violation("even", "vector", config.vector, "odd", {"vector": config.vector - 1})

    result = RuleBook([odd, even]).correct(toy.ToyConfig(vector=2), ARCH)
    assert not result.is_valid


def test_fixes_that_always_want_more_end() -> None:
    def more(config: toy.ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
        yield Violation("more", "vector", config.vector, "too few", {"vector": config.vector + 1})

    result = RuleBook([more]).correct(toy.ToyConfig(), ARCH)
    assert len(result.applied) == RuleBook.MAX_FIXES
    assert not result.is_valid


def test_a_rule_of_one_kind_of_device_is_evaluated_for_no_other() -> None:
    seen: list[str] = []

    @rule_of("cuda", "hip")
    def of_gpus(config: toy.ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
        seen.append(arch.id)
        yield Violation("of_gpus", "vector", config.vector, "GPUs have no vectors")

    book, gpu = RuleBook([of_gpus]), tilewright_arch.load("gfx942")
    assert book.allows(toy.ToyConfig(), ARCH) and not book.check(toy.ToyConfig(), ARCH) and not seen
    assert [item.rule for item in book.check(toy.ToyConfig(), gpu)] == ["of_gpus"] and seen == [gpu.id]
    assert not RuleBook(book.rules).check(toy.ToyConfig(), ARCH), "books made of a book's rules keep the kinds"


def test_an_error_names_the_first_violation_and_counts_the_others() -> None:
    with pytest.raises(ConfigInvalidError, match=r"registers hold 1 to 8 elements \(and 1 more\)") as caught:
        toy.RULES.require(toy.ToyConfig(vector=100, tile=(1, 1, 1)), ARCH)
    assert (caught.value.field, caught.value.value, caught.value.fix) == ("vector", "100", "vector=8")
