"""Random bytes: those of the published generator, each element's its own, the same whatever else is drawn with it."""

from __future__ import annotations

import numpy as np
import pytest
from philox_answers import ANSWERS, VECTORS

from tilewright_fmha.problem.philox import drop_below, philox4x32, random_bytes


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_the_generator_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox4x32(np.array(counter, np.uint64), key)) == words


def by_hand(seed: int, offset: int, batch_head: int, row: int, column: int) -> int:
    """One byte, with Python's own integers."""
    counter = [(column >> 6) * 4 + ((column & 7) >> 1), row, batch_head, offset]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ k0,
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ k1,
            first & 0xFFFFFFFF,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    place = ((column >> 3) & 7) * 2 + (column & 1)
    return counter[place // 4] >> (8 * (place % 4)) & 0xFF


@pytest.mark.parametrize("seed, offset, item, head, heads, row, column, byte", ANSWERS)
def test_every_element_has_its_byte(
    seed: int, offset: int, item: int, head: int, heads: int, row: int, column: int, byte: int
) -> None:
    assert by_hand(seed, offset, item * heads + head, row, column) == byte
    assert random_bytes(seed, offset, item * heads + head, row + 1, column + 3)[row, column] == byte


def test_a_byte_does_not_depend_on_what_is_drawn_beside_it() -> None:
    large = random_bytes(99, 3, 5, 70, 150)
    assert np.array_equal(random_bytes(99, 3, 5, 13, 65), large[:13, :65])
    assert random_bytes(99, 3, 5, 0, 65).shape == (0, 65)
    assert random_bytes(99, 3, 5, 4, 0).shape == (4, 0)


def test_seed_offset_and_head_each_give_other_bytes() -> None:
    base = random_bytes(1, 0, 0, 64, 64)
    for other in (random_bytes(2, 0, 0, 64, 64), random_bytes(1, 1, 0, 64, 64), random_bytes(1, 0, 1, 64, 64)):
        assert np.mean(base == other) < 0.02
    assert np.mean(base == random_bytes(1 + 2**32, 0, 0, 64, 64)) < 0.02, "the high word of the seed counts"


def test_bytes_are_spread_evenly() -> None:
    counts = np.bincount(random_bytes(7, 0, 3, 256, 1024).ravel(), minlength=256)
    expected = 1024.0
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert 150 < chi < 370, "255 degrees of freedom: five standard deviations are 113"


@pytest.mark.parametrize("p, below", [(0.0, 0), (0.001, 1), (0.1, 26), (0.5, 128), (0.999, 255), (0.9999999, 255)])
def test_probabilities_are_rounded_to_bytes_and_never_to_none_or_all(p: float, below: int) -> None:
    assert drop_below(p) == below
