"""What comes after a fallback when something goes wrong on the way: builds that fail for a while, kernels that vanish,
devices that are out of memory. Whoever asked goes on with the fallback, and gets the better kernel in the end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_harness import BEST, TWO_STAGES, Vectors, call, plan
from vector_operation import VectorConfig, request

from tilewright_kit.types.errors import (
    BuildFailedError,
    CancelledError,
    DeadlineError,
    DeviceError,
    ResourceExhaustedError,
    UnavailableError,
)
from tilewright_native import include_dir
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.engine.call import Call
from tilewright_server.engine.delayed_worker import Later
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.types import Selection

SOON = Selection(build="fallback")
FULL = ResourceExhaustedError("the disk is full", rule="cache_full", fix="free space", retry_after_s=0.01)


class Faulty(CpuToolchain):
    """Builds the best kernel when ``go`` is set, and fails with ``failures`` first."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__([include_dir()])
        self.failures, self.go = list(failures), threading.Event()

    def compile(self, unit: Any, workdir: Path, arch: Any, abort: threading.Event | None = None) -> Any:
        if unit.name == BEST:
            assert self.go.wait(60)
            if self.failures:
                raise self.failures.pop(0)
        return super().compile(unit, workdir, arch, abort)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright_server.engine.planning.planner._RETRY_S", 0.01)


def faulty_engine(make_engine: Any, tmp_path: Path, *failures: Exception) -> tuple[Engine, Faulty]:
    """An engine that builds one kernel at a time and has one that can serve as a fallback."""
    toolchain = Faulty(*failures)
    engine = make_engine({"c++": toolchain}, cache_dir=tmp_path / "cache", build_workers=1)
    plan(engine, 100, Selection(kernel=TWO_STAGES))
    return engine, toolchain


def better(prepared: Prepared, seconds: float = 60) -> Prepared:
    """What takes the place of a fallback."""
    end = time.monotonic() + seconds
    while prepared.current.is_fallback and time.monotonic() < end:
        time.sleep(0.01)
    assert not prepared.current.is_fallback, "nothing took its place"
    return prepared.current


def test_a_better_kernel_that_vanished_is_built_again_even_by_a_single_worker(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = faulty_engine(make_engine, tmp_path)
    prepared = plan(engine, 100, SOON)
    best = engine._store.unit(VectorConfig(rank=1), prepared.device.arch).key
    publish, evictions = engine.cache.publish, [best]

    def publish_and_evict(unit: Any, meta: Any, *rest: Any) -> bool:
        published = publish(unit, meta, *rest)
        if meta.key in evictions:
            evictions.remove(meta.key)
            engine.cache.files.remove_tree(engine.cache.entry(meta.key))
        return published

    engine.cache.publish = publish_and_evict  # type: ignore[method-assign]
    toolchain.go.set()
    assert better(prepared).kernels == (BEST,)
    assert plan(engine, 100).kernels == (BEST,), "who waits is not held up"


@pytest.mark.parametrize(
    "failure",
    [FULL, BuildFailedError("killed", rule="compiler_aborted", fix="try again")],
    ids=["disk", "killed"],
)
@pytest.mark.extended
def test_a_build_that_failed_for_a_while_is_tried_again_behind_the_fallback(
    failure: Exception, make_engine: Any, tmp_path: Path
) -> None:
    engine, toolchain = faulty_engine(make_engine, tmp_path, failure, failure, failure)
    toolchain.go.set()
    prepared = plan(engine, 100, SOON)
    assert prepared.kernels == (TWO_STAGES,)
    assert better(prepared).kernels == (BEST,)
    vectors = Vectors(100)
    engine.execute(prepared, vectors.addresses, call())
    assert vectors.right()


@pytest.mark.extended
def test_a_device_without_room_for_the_better_kernel_is_asked_again(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = faulty_engine(make_engine, tmp_path)
    prepared = plan(engine, 100, SOON)
    device, refusals = engine.devices.get(), [1, 2, 3]
    load = device.load

    def load_when_there_is_room(binary: Path) -> Any:
        if refusals:
            refusals.pop()
            raise ResourceExhaustedError("no memory for a module", rule="device_memory", fix="free some")
        return load(binary)

    device.load = load_when_there_is_room  # type: ignore[method-assign]
    toolchain.go.set()
    assert better(prepared).kernels == (BEST,)
    assert not refusals


def test_a_better_kernel_that_cannot_be_asked_for_now_does_not_keep_the_fallback_from_answering(
    make_engine: Any, tmp_path: Path
) -> None:
    engine, toolchain = faulty_engine(make_engine, tmp_path)
    toolchain.go.set()
    submit, refusals = engine._store.submit, [1, 2]

    def submit_when_it_works(*args: Any, **options: Any) -> Any:
        if refusals:
            refusals.pop()
            raise UnavailableError("not now", rule="planted")
        return submit(*args, **options)

    engine._store.submit = submit_when_it_works  # type: ignore[method-assign]
    prepared = plan(engine, 100, SOON)
    assert (prepared.is_fallback, prepared.kernels) == (True, (TWO_STAGES,))
    assert better(prepared).kernels == (BEST,)


def test_a_fallback_that_cannot_be_loaded_gives_way_to_another(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = faulty_engine(make_engine, tmp_path)
    second = VectorConfig(rank=2).name
    plan(engine, 100, Selection(kernel=second))
    store, use = engine._store, engine._store.use

    def use_no_second(device: Any, unit: Any, *rest: Any) -> Any:
        if unit.source.name == second:
            raise DeviceError("this is no module", rule="planted")
        return use(device, unit, *rest)

    store.use = use_no_second  # type: ignore[method-assign]
    assert plan(engine, 100, SOON).kernels == (TWO_STAGES,)
    toolchain.go.set()  # or the engine's end would wait for it


@pytest.mark.extended
def test_who_waits_for_another_to_load_a_kernel_keeps_its_own_deadline(make_engine: Any) -> None:
    engine = make_engine()
    device, going, slow = engine.devices.get(), threading.Event(), threading.Event()
    load = device.load

    def load_slowly(binary: Path) -> Any:
        going.set()
        assert slow.wait(60)
        return load(binary)

    device.load = load_slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(plan, engine, 100)
        assert going.wait(60)
        with pytest.raises(DeadlineError):
            engine.plan(request(100), Selection(), Call.within(0.05))
        leaving = call()
        gone = threads.submit(engine.plan, request(100), Selection(), leaving)
        leaving.cancel()
        with pytest.raises(CancelledError):
            gone.result(60)
        slow.set()
        assert first.result(60) is plan(engine, 100)


def test_an_engine_that_ends_does_not_wait_for_what_would_be_tried_later(
    make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright_server.engine.planning.planner._RETRY_S", 3600)
    engine, toolchain = faulty_engine(make_engine, tmp_path, *[FULL] * 1000)  # however often it is tried
    toolchain.go.set()
    prepared = plan(engine, 100, SOON)
    later = engine._planner._later
    end = time.monotonic() + 60
    while not later._waiting:
        assert time.monotonic() < end, "nothing is to be tried later"
        time.sleep(0.01)
    engine.close()
    assert later._thread is not None
    assert not later._thread.is_alive()
    assert prepared.is_fallback


# The thread that does it


def test_later_runs_in_time_order_and_survives_what_fails() -> None:
    later, done, heard = Later("test"), [], threading.Event()
    later.run(heard.set, 0.05)
    later.run(lambda: done.append(2), 0.02)
    later.run(lambda: 1 / 0)
    later.run(lambda: done.append(1))
    assert heard.wait(60)
    assert done == [1, 2]
    later.close()
    later.run(lambda: done.append(3))
    later.close()
    assert done == [1, 2]


def test_later_ends_while_it_waits() -> None:
    later = Later("test")
    later.run(lambda: None, 3600)
    later.close()
