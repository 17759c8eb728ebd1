"""How samples are taken, and when a kernel is given up."""

from __future__ import annotations

import pytest

from tilewright_tools.tuning.measure.timing import Timing, TimingOptions, measure, percentile


class Kernel:
    """A kernel whose runs take the given times, the last for ever."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.repeats: list[int] = []

    def __call__(self, repeat: int) -> float:
        self.repeats.append(repeat)
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


def test_the_median_and_the_tenths_of_the_samples() -> None:
    kernel = Kernel(9e6, 1e6, 5e6, 3e6, 2e6, 4e6)
    found = measure(kernel, TimingOptions(warmup=1, repeat=5))
    assert found == Timing(3e6, 1e6, 5e6, 5)
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 90) == 9.0
    assert measure(Kernel(1e6, 4e6, 2e6), TimingOptions(warmup=1, repeat=2)).median_ns == 3e6


def test_short_kernels_are_repeated_within_a_sample_and_long_ones_are_not() -> None:
    short, long, turning = Kernel(1000.0), Kernel(1e6), Kernel(1e6)
    measure(short, TimingOptions(warmup=2, repeat=3))
    assert short.repeats == [1, 1, 100, 100, 100]
    measure(long, TimingOptions(warmup=1, repeat=3))
    assert long.repeats == [1, 1, 1, 1]
    measure(turning, TimingOptions(warmup=1, repeat=3), turns=4)
    assert turning.repeats == [1, 2, 2, 2]


def test_what_comes_before_a_sample_is_done_for_each_and_makes_it_one_run() -> None:
    kernel, calls = Kernel(10.0), []
    measure(kernel, TimingOptions(warmup=1, repeat=4), before=lambda: calls.append(1))
    assert kernel.repeats == [1] * 5
    assert len(calls) == 4


@pytest.mark.parametrize(("limit", "cut", "samples"), [(0.0, False, 8), (2.5e6, False, 8), (1.9e6, True, 3)])
def test_a_kernel_whose_first_samples_are_all_too_slow_is_given_up(limit: float, cut: bool, samples: int) -> None:
    found = measure(Kernel(2e6, 3e6, 2e6, 4e6), TimingOptions(warmup=1, repeat=8), limit_ns=limit)
    assert (found.cut, found.samples) == (cut, samples)


def test_three_samples_are_taken_even_if_there_is_no_time() -> None:
    assert measure(Kernel(1e6), TimingOptions(warmup=5, repeat=50, seconds=0.0)).samples == 3
