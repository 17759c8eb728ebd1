"""Workspace of executions: shared, limited, given back, and counted."""

from __future__ import annotations

import threading
import time

import pytest
from executor_bench import ADDRESSES, Bench, FakeDevice

from tilewright_kit.types.errors import (
    ResourceExhaustedError,
)
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.workspace_arena import Arena

# Workspace


def test_workspace_is_reused(bench: Bench) -> None:
    prepared = bench.prepare("x", workspace=100_000)
    for _ in range(50):
        bench.executor.run(prepared, ADDRESSES, Call())
    assert bench.device.allocations == 1
    assert len(set(prepared.program.workspaces)) == 1  # type: ignore[union-attr]


def test_executions_at_the_same_time_have_workspaces_of_their_own(bench: Bench) -> None:
    gate = threading.Event()
    plans = [bench.prepare(f"{number}", 1, gate, workspace=1000) for number in range(4)]
    futures = [bench.start(prepared) for prepared in plans]
    gate.set()
    for future in futures:
        future.result(20)
    assert len({prepared.program.workspaces[0] for prepared in plans}) == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("nbytes", [1, 65536, 65537, 98304, 98305, 131072, 10**6, 10**9])
def test_size_classes_waste_little(nbytes: int) -> None:
    device = FakeDevice()
    arena = Arena(device, 1 << 40)  # type: ignore[arg-type]
    buffer = arena.take(nbytes)
    assert nbytes <= buffer.nbytes <= max(65536, nbytes * 3 // 2)
    arena.give_back(buffer)
    assert arena.take(nbytes) is buffer


def test_workspace_limit_is_kept_and_idle_sizes_make_room() -> None:
    device = FakeDevice()
    arena = Arena(device, 1 << 20)  # type: ignore[arg-type]
    held = arena.take(512 << 10)
    arena.give_back(arena.take(256 << 10))
    with pytest.raises(ResourceExhaustedError) as caught:
        arena.take(768 << 10)
    assert caught.value.retry_after_s
    big = arena.take(512 << 10)  # the idle quarter was given back for it
    assert sum(device.live.values()) == arena.reserved_bytes == 1 << 20
    with pytest.raises(ResourceExhaustedError) as caught:
        arena.take(2 << 20)
    assert caught.value.retry_after_s is None, "waiting does not help against the limit itself"
    for buffer in (held, big):
        arena.give_back(buffer)
    arena.close()
    assert not device.live
    assert arena.reserved_bytes == 0


def test_errors_of_the_limit_name_a_remedy_for_their_cause_and_no_operation() -> None:
    arena = Arena(FakeDevice(), 1 << 20)  # type: ignore[arg-type]
    arena.claim(512 << 10)
    for nbytes, remedy in ((768 << 10, "fewer executions"), (2 << 20, "smaller parts")):
        with pytest.raises(ResourceExhaustedError) as caught:
            arena.claim(nbytes)
        assert remedy in caught.value.fix
        assert "workspace_bytes" in caught.value.fix, "the setting"
        assert "split" not in caught.value.fix, "k is a word of products"


def test_idle_workspace_is_given_back_in_time() -> None:
    device = FakeDevice()
    arena = Arena(device, 1 << 30, idle_s=0.05)  # type: ignore[arg-type]
    arena.give_back(arena.take(1 << 20))
    time.sleep(0.1)
    arena.give_back(arena.take(100))
    assert arena.reserved_bytes == 65536


def test_the_arena_counts_what_others_take() -> None:
    arena = Arena(FakeDevice(), 1 << 20)  # type: ignore[arg-type]
    arena.give_back(arena.take(512 << 10))
    arena.claim(768 << 10)  # what is idle makes room
    for nbytes, later in ((512 << 10, 0.05), (2 << 20, None)):
        with pytest.raises(ResourceExhaustedError) as caught:
            arena.claim(nbytes)
        assert (caught.value.rule, caught.value.retry_after_s) == ("workspace_limit", later)
    with pytest.raises(ResourceExhaustedError):
        arena.take(512 << 10)
    arena.disclaim(768 << 10)
    assert arena.reserved_bytes == 0


def test_refused_allocation_is_not_counted() -> None:
    device = FakeDevice()
    arena = Arena(device, 1 << 30)  # type: ignore[arg-type]
    device.allocate = lambda nbytes: (_ for _ in ()).throw(ResourceExhaustedError("none"))  # type: ignore[method-assign]
    with pytest.raises(ResourceExhaustedError):
        arena.take(100)
    assert arena.reserved_bytes == 0
