"""Orders of waves, and memory as weak as GPUs may have it: what is right stays right, and what misses a wait, a release
or an acquire computes wrong numbers, whether or not a rule of the checks sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulator_compile import load, run, zeros
from emulator_text import ALL
from test_launch import HANDOVER

from tilewright_emulator import Checks
from tilewright_emulator.errors import LdsRace, UninitialisedLds

TURNS = """
#ifdef __GFX9__
#define WAIT_FOR_STORES asm volatile("s_waitcnt vmcnt(0)" ::: "memory")
#else
#define WAIT_FOR_STORES
#endif
#define TURNS(NAME, LOAD, STORED, STORE)                                                             \\
  KERNEL(128) NAME(u32* data, u32* turn) {                                                           \\
    if (thread() == 0)                                                                               \\
      while (__hip_atomic_load(turn, __ATOMIC_##LOAD, __HIP_MEMORY_SCOPE_AGENT) != block()) {}       \\
    barrier();                                                                                       \\
    data[thread()] = (data[thread()] << 4) + block() + 1;                                            \\
    STORED;                                                                                          \\
    barrier();                                                                                       \\
    if (thread() == 0) __hip_atomic_store(turn, block() + 1, __ATOMIC_##STORE, __HIP_MEMORY_SCOPE_AGENT); \\
  }
TURNS(turns, ACQUIRE, WAIT_FOR_STORES, RELEASE)
TURNS(not_waited, ACQUIRE, , RELEASE)
TURNS(not_released, ACQUIRE, , RELAXED)
TURNS(not_acquired, RELAXED, WAIT_FOR_STORES, RELEASE)
"""

WAVES = """
KERNEL(256) without_barrier(u32* out, u32* slots) {
  slots[thread()] = thread();
  out[thread()] = slots[255 - thread()];
}
KERNEL(256) with_barrier(u32* out, u32* slots) {
  slots[thread()] = thread();
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  out[thread()] = slots[255 - thread()];
}
KERNEL(256) loops(u32* out, u32 count) {
  SHARED static u32 words[256];
  u32 sum = 0;
  for (u32 i = 0; i < count; i++) {
    words[thread()] = thread() * i;
    barrier();
    sum += words[(thread() + 64) % 256];
    barrier();
  }
  out[block() * 256 + thread()] = sum;
}
KERNEL(256) too_soon(u32* out) {
  SHARED static u32 words[256];
  words[thread()] = thread();
  out[thread()] = words[255 - thread()];
}
"""

ORDERS = (0, 1, -1, 7)
WEAK = {"publication": False, "global_races": False, "weak": True, "instruction_limit": 200_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def handed(code: Any, name: str, order: int, groups: int = 4) -> bool:
    """True if the last workgroup added up what all have stored."""
    out, slots, counter = zeros(256), zeros(256 * groups), zeros(1)
    checks = Checks(waves=order, **WEAK)
    run(code, name, out, slots, counter, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)
    found: bool = out.tolist() == [groups * t + groups * (groups - 1) // 2 for t in range(256)]
    return found


@pytest.mark.parametrize("arch", ALL)
class TestWeakMemory:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.some(8)
    def test_what_is_released_and_acquired_is_seen(self, folder: Path, arch: str, order: int) -> None:
        assert handed(load(folder, HANDOVER, arch), "in_order", order)

    def test_what_is_not_is_read_as_it_was_before(self, folder: Path, arch: str) -> None:
        code = load(folder, HANDOVER, arch)
        # A release by one wave covers stores of others only once they have waited for them.
        assert not all(handed(code, "too_early", order) for order in (1, *range(7, 15)))
        assert not handed(code, "from_a_cache", 0)
        if arch in ("gfx942", "gfx950"):  # dies, each with its L2 cache
            assert not handed(code, "not_written_back", 0)
        else:
            assert handed(code, "not_written_back", 0), "one L2 cache: nothing is to be written back"

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.some(2)
    def test_flags_that_are_polled_hand_over_what_was_stored_before(self, folder: Path, arch: str, order: int) -> None:
        """By plain loads of a number: the checks by rules know atomics only."""
        data, turn = zeros(128), zeros(1)
        checks = Checks(waves=order, **WEAK)
        run(load(folder, TURNS, arch), "turns", data, turn, grid=(3, 1, 1), block=(128, 1, 1), checks=checks)
        assert set(data.tolist()) == {0x123}
        assert turn[0] == 3

    @pytest.mark.parametrize("name", ["not_waited", "not_released", "not_acquired"])
    @pytest.mark.some(1)
    def test_flags_that_miss_an_instruction_hand_over_what_was_before(self, folder: Path, arch: str, name: str) -> None:
        data, turn = zeros(128), zeros(1)
        run(load(folder, TURNS, arch), name, data, turn, grid=(3, 1, 1), block=(128, 1, 1), checks=Checks(**WEAK))
        assert (set(data.tolist()) == {0x123}) is ((name, arch) in STRONG)


STRONG = {(name, arch) for name in ("not_released", "not_waited") for arch in ("gfx1100", "gfx1201")}
"""Barriers wait for stores there as they are compiled, and one L2 cache serves the device: nothing is missing."""


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "gfx1201"])
class TestOrdersOfWaves:
    @pytest.mark.parametrize("order", [*ORDERS, 8, 9])
    @pytest.mark.some(6)
    def test_barriers_hold_in_any_order(self, folder: Path, arch: str, order: int) -> None:
        out, checks = zeros(768), Checks(waves=order)
        run(load(folder, WAVES, arch), "loops", out, 7, grid=(3, 1, 1), block=(256, 1, 1), checks=checks)
        assert out.tolist() == [(t + 64) % 256 * 21 for t in range(256)] * 3
        with pytest.raises((LdsRace, UninitialisedLds)):
            run(load(folder, WAVES, arch), "too_soon", out, block=(256, 1, 1), checks=checks)

    def test_what_only_lock_step_makes_right_is_wrong_in_other_orders(self, folder: Path, arch: str) -> None:
        """Through memory of the device, of which no check says that waves of one workgroup race."""

        def right(name: str, order: int) -> bool:
            out, slots = zeros(256), zeros(256)
            checks = Checks(waves=order, global_races=False, publication=False)
            run(load(folder, WAVES, arch), name, out, slots, block=(256, 1, 1), checks=checks)
            return bool(out.tolist() == [255 - t for t in range(256)])

        assert right("without_barrier", 0)
        assert not any(right("without_barrier", order) for order in (1, -1))
        assert all(right("with_barrier", order) for order in (*ORDERS, 8, 9))
