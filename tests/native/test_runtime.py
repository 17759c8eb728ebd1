"""The thread pool: teams, barriers, many callers, sleep, fork; and arena memory."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_harness import Runtime, build_once

SOURCE = """
#include "tilewright/cpu/team.hpp"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void nothing(const void*, tw_team*) {}
// Every member adds its rank + 1 to each cell in turn; a member that runs ahead of a barrier would read a wrong sum.
struct Relay { int64_t rounds; int64_t cells; int64_t* values; int64_t errors; };
EXPORT void relay(const void* args, tw_team* team) {
  Relay* r = (Relay*)args;
  tw::Crew crew = tw::crew_of(team, 1 << 20);
  const int64_t per_round = (int64_t)crew.size * (crew.size + 1) / 2;
  for (int64_t round = 0; round < r->rounds; round++) {
    int64_t* cell = r->values + round % r->cells;
    const int64_t before = round / r->cells * per_round;
    __atomic_fetch_add(cell, crew.rank + 1, __ATOMIC_RELAXED);
    crew.barrier();
    if (__atomic_load_n(cell, __ATOMIC_RELAXED) != before + per_round)
      __atomic_fetch_add(&r->errors, 1, __ATOMIC_RELAXED);
    crew.barrier();
  }
}
// Pieces of several stages of odd sizes: each must be claimed once.
struct Claims { int64_t stages; int64_t pieces; int64_t* taken; };
EXPORT void claims(const void* args, tw_team* team) {
  const Claims* c = (const Claims*)args;
  tw::Crew crew = tw::crew_of(team, 1 << 20);
  for (int64_t s = 0; s < c->stages; s++) {
    const int64_t pieces = s % (c->pieces + 1);
    for (int64_t p; (p = crew.claim(pieces)) >= 0;)
      __atomic_fetch_add(c->taken + s * c->pieces + p, 1, __ATOMIC_RELAXED);
    crew.end_stage(pieces);
  }
}
extern "C" int sched_getcpu(void) noexcept;
EXPORT void where(const void* args, tw_team* team) { ((int32_t*)args)[team->rank] = sched_getcpu(); }
"""


class Relay(ctypes.Structure):
    _fields_ = [
        ("rounds", ctypes.c_int64),
        ("cells", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("errors", ctypes.c_int64),
    ]


class Claims(ctypes.Structure):
    _fields_ = [("stages", ctypes.c_int64), ("pieces", ctypes.c_int64), ("taken", ctypes.c_void_p)]


class Stage(ctypes.Structure):
    _fields_ = [
        ("fn", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("team", ctypes.c_int32),
        ("nanoseconds", ctypes.c_int64),
    ]


@pytest.fixture(scope="module")
def kernels(build_folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_once(build_folder, SOURCE)))


def relay(runtime: Runtime, kernels: ctypes.CDLL, team: int, rounds: int, pool: int | None = None) -> int:
    values = np.zeros(7, np.int64)
    args = Relay(rounds, 7, values.ctypes.data, 0)
    runtime.launch(kernels.relay, args, team, pool)
    return int(args.errors)


def test_a_barrier_holds_every_member(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    assert relay(runtime, kernels, 2, 20_000) == 0


def test_a_barrier_holds_when_there_are_more_members_than_processors(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    threads = 3 * len(os.sched_getaffinity(0))
    pool = runtime.open(threads)
    try:
        assert relay(runtime, kernels, threads, 300, pool) == 0
    finally:
        runtime.lib.tw_pool_close(pool)


def test_every_piece_is_claimed_once(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    taken = np.zeros((200, 13), np.int64)
    runtime.launch(kernels.claims, Claims(200, 13, taken.ctypes.data), 2)
    want = (np.arange(13) < (np.arange(200) % 14)[:, None]).astype(np.int64)
    assert np.array_equal(taken, want)


@pytest.mark.extended
def test_many_callers_share_a_pool(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    pool = runtime.open(4)
    errors: list[int] = []

    def caller(team: int) -> None:
        errors.extend(relay(runtime, kernels, team, 20, pool) for _ in range(20))

    threads = [threading.Thread(target=caller, args=(1 + i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runtime.lib.tw_pool_close(pool)
    assert errors == [0] * 160


def test_workers_that_fell_asleep_are_woken(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    for _ in range(20):
        time.sleep(0.002)
        assert relay(runtime, kernels, 2, 2) == 0


def test_an_idle_pool_uses_no_processor_time(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    runtime.launch(kernels.nothing, None, 2)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_members_run_on_their_processors_and_the_caller_is_set_free_again(
    runtime: Runtime, kernels: ctypes.CDLL
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    before = os.sched_getaffinity(0)
    cpus = (ctypes.c_int32 * 2)(-1, -1)
    runtime.launch(kernels.where, cpus, 2)
    assert sorted(cpus) == sorted(before)[:2]
    assert os.sched_getaffinity(0) == before


def test_stages_run_in_order_and_are_timed(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    values = np.zeros(7, np.int64)
    args = Relay(100, 7, values.ctypes.data, 0)
    pointer = ctypes.cast(ctypes.byref(args), ctypes.c_void_p)
    stages = (Stage * 2)()
    for stage, (function, team) in zip(stages, ((kernels.relay, 2), (kernels.nothing, 1)), strict=True):
        stage.fn, stage.args, stage.team = ctypes.cast(function, ctypes.c_void_p).value, pointer.value, team
    assert runtime.lib.tw_pool_run(ctypes.c_void_p(runtime.pool), stages, 2) == 0
    assert args.errors == 0
    assert stages[0].nanoseconds > stages[1].nanoseconds > 0


@pytest.mark.parametrize("team", [0, -1, 3])
def test_a_team_that_does_not_fit_is_refused(runtime: Runtime, kernels: ctypes.CDLL, team: int) -> None:
    with pytest.raises(OSError) as caught:
        runtime.launch(kernels.nothing, None, team)
    assert caught.value.errno == errno.EINVAL


def test_a_forked_child_is_refused_and_the_parent_works_on(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import ctypes, errno
from pathlib import Path
from native_harness import Runtime
runtime = Runtime(Path({runtime.lib._name!r}), 2)
kernels = ctypes.CDLL({kernels._name!r})
child = os.fork()
if child == 0:
    try:
        runtime.launch(kernels.nothing, None, 2)
    except OSError as error:
        os._exit(7 if error.errno == errno.ECHILD else 1)
    os._exit(2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
runtime.launch(kernels.nothing, None, 2)
runtime.lib.tw_pool_close(runtime.pool)
sys.exit(status)
"""
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]) == 7


@pytest.mark.parametrize("size", [1, 4096, 100_000, 3 << 20])
def test_reserved_memory_is_zeroed_and_present(runtime: Runtime, size: int) -> None:
    address = runtime.lib.tw_memory_reserve(size)
    memory = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
    assert not memory.any()
    assert address % ((2 << 20) if size > 1 << 20 else 4096) == 0
    runtime.lib.tw_memory_release(address, size)


def test_launch_overhead_is_reported(runtime: Runtime, kernels: ctypes.CDLL) -> None:
    """Printed, not asserted: other processes share the machine."""
    stages: Any = (Stage * 200)()
    for team in (1, 2):
        for stage in stages:
            stage.fn, stage.team = ctypes.cast(kernels.nothing, ctypes.c_void_p).value, team
        best = 1e9
        for _ in range(20):
            runtime.lib.tw_pool_run(ctypes.c_void_p(runtime.pool), stages, 200)
            best = min(best, sum(stage.nanoseconds for stage in stages) / 200)
        sys.stdout.write(f"a launch of team {team}: {best:.0f} ns\n")
