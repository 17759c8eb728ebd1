"""The engine and its builds: failures, spilling kernels, fallbacks, deadlines and damaged artifacts."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_harness import BEST, BROKEN, TWO_STAGES, Vectors, call, plan
from vector_operation import request

from tilewright_kit.types.errors import (
    BuildFailedError,
    CancelledError,
    DeadlineError,
    ResourceExhaustedError,
    ToolchainMissingError,
)
from tilewright_native import include_dir
from tilewright_server.build.cache.files import Files
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import Selection

# Building


def test_failed_build_is_told_with_its_log_and_not_retried(engine: Engine) -> None:
    for _ in range(3):
        with pytest.raises(BuildFailedError) as caught:
            plan(engine, 10, Selection(kernel=BROKEN))
        assert "planted by the test" in caught.value.log_tail
    assert engine.statistics.snapshot().artifact_failures == 1


class Small(CpuToolchain):
    """Finds that these kernels would spill registers."""

    def __init__(self, *spilling: str) -> None:
        super().__init__([include_dir()])
        self.spilling, self.compiled = spilling, list[str]()

    def compile(self, unit: Any, workdir: Path, arch: Any, abort: threading.Event | None = None) -> Any:
        self.compiled.append(unit.name)
        if unit.name in self.spilling:
            raise BuildFailedError(f"{unit.name} would spill", rule="kernel_spills", fix="choose another kernel")
        return super().compile(unit, workdir, arch, abort)


def small_engine(make_engine: Any, tmp_path: Path, *spilling: str) -> tuple[Engine, Small]:
    toolchain = Small(*spilling)
    return make_engine({"c++": toolchain}, cache_dir=tmp_path / "cache"), toolchain


class Held(CpuToolchain):
    """Compiles nothing before it may."""

    def __init__(self) -> None:
        super().__init__([include_dir()])
        self.begun, self.free = threading.Event(), threading.Event()

    def compile(self, unit: Any, workdir: Path, arch: Any, abort: threading.Event | None = None) -> Any:
        self.begun.set()
        assert self.free.wait(60)
        return super().compile(unit, workdir, arch, abort)


def test_the_time_of_a_plan_is_what_its_caller_waited_for_other_than_builds(make_engine: Any, tmp_path: Path) -> None:
    toolchain, early, late = Held(), call(), call()
    engine = make_engine({"c++": toolchain}, cache_dir=tmp_path / "cache")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(engine.plan, request(100), Selection(), early)
        assert toolchain.begun.wait(60)
        time.sleep(0.3)  # the build takes at least so much longer than whoever comes now waits for it
        begin = time.perf_counter_ns()
        second = pool.submit(engine.plan, request(100), Selection(), late)
        time.sleep(0.05)
        toolchain.free.set()
        assert second.result(60) is first.result(60)
        waited = time.perf_counter_ns() - begin
    assert late.build_ns + 0.25e9 < early.build_ns, "of the build, only what this caller waited"
    assert late.plan_ns >= 0
    assert 0 <= late.plan_ns + late.build_ns <= waited
    (counters,) = engine.statistics.snapshot().operations
    assert counters.plan_ns >= late.plan_ns


def test_a_kernel_that_does_not_fit_gives_way_to_the_next(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = small_engine(make_engine, tmp_path, BEST)
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(lambda _: plan(engine, 100), range(8)))
    prepared = plans[0]
    assert all(item is prepared for item in plans)
    assert BEST not in prepared.kernels
    assert any(BEST in note and "fit" in note for note in prepared.notes)
    assert not prepared.is_fallback, "nothing better is to come"
    again = call()
    assert engine.plan(request(100), Selection(), again) is prepared
    assert again.plan_cached
    assert toolchain.compiled.count(BEST) == 1
    vectors = Vectors(100)
    engine.execute(prepared, vectors.addresses, call())
    assert vectors.right()


def test_a_kernel_that_was_asked_for_by_name_and_does_not_fit_is_told(make_engine: Any, tmp_path: Path) -> None:
    engine, _ = small_engine(make_engine, tmp_path, BEST)
    with pytest.raises(BuildFailedError, match="would spill"):
        plan(engine, 100, Selection(kernel=BEST))


def test_a_fallback_gives_way_to_the_best_kernel_that_fits(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = small_engine(make_engine, tmp_path, BEST)
    plan(engine, 100, Selection(kernel=TWO_STAGES))
    prepared = plan(engine, 100, Selection(build="fallback"))
    assert prepared.kernels == (TWO_STAGES,)
    for _ in range(6000):
        if not prepared.current.is_fallback:
            break
        time.sleep(0.02)
    better = prepared.current
    assert not better.is_fallback, "nothing took its place"
    assert BEST not in better.kernels
    assert any(BEST in note and "fit" in note for note in better.notes)
    assert plan(engine, 100) is better, "who waits gets the same"
    assert toolchain.compiled.count(BEST) == 1
    vectors = Vectors(100)
    engine.execute(prepared, vectors.addresses, call())
    assert vectors.right()


def test_missing_compiler_is_told(make_engine: Any, tmp_path: Path) -> None:
    engine = make_engine(cache_dir=tmp_path / "cache", compiler="no-such-compiler")
    with pytest.raises(ToolchainMissingError):
        plan(engine)


class Slow(CpuToolchain):
    """Compiles a kernel whose name says so only when it is let go."""

    def __init__(self, slow: str) -> None:
        super().__init__([include_dir()])
        self.slow, self.go, self.compiled = slow, threading.Event(), list[str]()

    def compile(self, unit: Any, workdir: Path, arch: Any, abort: threading.Event | None = None) -> Any:
        self.compiled.append(unit.name)
        if unit.name == self.slow:
            assert self.go.wait(60)
        return super().compile(unit, workdir, arch, abort)


def slow_engine(make_engine: Any, tmp_path: Path) -> tuple[Engine, Slow]:
    toolchain = Slow(BEST)
    engine = make_engine({"c++": toolchain}, cache_dir=tmp_path / "cache", build_workers=2)
    engine.devices.get()  # its runtime is built now
    return engine, toolchain


def test_fallback_answers_while_the_better_kernel_is_built_and_then_gives_way(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = slow_engine(make_engine, tmp_path)
    plan(engine, 100, Selection(kernel=TWO_STAGES))
    prepared = plan(engine, 100, Selection(build="fallback"))
    assert prepared.is_fallback, "it was not waited for"
    assert prepared.kernels == (TWO_STAGES,)
    assert any(BEST in note for note in prepared.notes)
    vectors = Vectors(100)
    engine.execute(prepared, vectors.addresses, call())
    assert vectors.right()
    toolchain.go.set()
    waited = plan(engine, 100)
    assert waited.kernels == (BEST,)
    assert plan(engine, 100, Selection(build="fallback")) is waited
    for _ in range(3000):
        if prepared.current is waited:
            break
        time.sleep(0.01)
    vectors = Vectors(100)
    assert len(engine.execute(prepared, vectors.addresses, call()).stages_ns) == 1
    assert vectors.right()


def test_fallback_with_nothing_built_waits(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = slow_engine(make_engine, tmp_path)
    threading.Timer(0.1, toolchain.go.set).start()
    prepared = plan(engine, 100, Selection(build="fallback"))
    assert (prepared.is_fallback, prepared.kernels) == (False, (BEST,))
    assert toolchain.compiled.count(BEST) == 1


def test_deadline_of_a_plan_does_not_end_the_build(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = slow_engine(make_engine, tmp_path)
    with pytest.raises(DeadlineError):
        engine.plan(request(10), Selection(), Call.within(0.05))
    toolchain.go.set()
    patient = call()
    engine.plan(request(10), Selection(), patient)
    assert toolchain.compiled.count(BEST) == 1
    assert patient.build_ns > 0


def test_plan_can_be_cancelled_while_it_builds(make_engine: Any, tmp_path: Path) -> None:
    engine, toolchain = slow_engine(make_engine, tmp_path)
    waiting = call()
    threading.Timer(0.05, waiting.cancel).start()
    with pytest.raises(CancelledError):
        engine.plan(request(10), Selection(), waiting)
    toolchain.go.set()


def test_damaged_kernel_is_rebuilt(make_engine: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = make_engine(cache_dir=cache)
    plan(first)
    first.close()
    for binary in cache.rglob("kernel.so"):
        binary.write_bytes(b"damaged")
    second = make_engine(cache_dir=cache)
    vectors = Vectors(100)
    second.execute(plan(second), vectors.addresses, call())
    assert vectors.right()
    assert second.statistics.snapshot().artifacts_quarantined == 2  # the runtime, too


class Garbage(CpuToolchain):
    """Ends well, but what it writes for the best kernel is no binary, as often as is said."""

    def __init__(self, times: int) -> None:
        super().__init__([include_dir()])
        self.left = times
        self.compiled = 0

    def compile(self, unit: Any, workdir: Path, arch: Any, abort: threading.Event | None = None) -> Any:
        compiled = super().compile(unit, workdir, arch, abort)
        if unit.name == BEST:
            self.compiled += 1
            if self.left:
                self.left -= 1
                compiled.binary.write_bytes(b"garbage")
        return compiled


def test_binary_that_cannot_be_loaded_harms_its_kernel_only_and_is_not_kept(make_engine: Any, tmp_path: Path) -> None:
    toolchain = Garbage(1000)
    engine = make_engine({"c++": toolchain}, cache_dir=tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(BuildFailedError) as caught:
            plan(engine)
        assert caught.value.rule == "binary_unloadable"
        assert str(tmp_path) not in str(caught.value)
    assert toolchain.compiled == 2
    vectors = Vectors(100)
    engine.execute(plan(engine, 100, Selection(kernel=TWO_STAGES)), vectors.addresses, call())
    assert vectors.right()
    engine.close()
    mended = make_engine(cache_dir=tmp_path / "cache")
    vectors = Vectors(100)
    mended.execute(plan(mended), vectors.addresses, call())
    assert vectors.right()


def test_binary_that_cannot_be_loaded_is_set_aside_and_built_once_more(make_engine: Any, tmp_path: Path) -> None:
    toolchain = Garbage(1)
    engine = make_engine({"c++": toolchain}, cache_dir=tmp_path / "cache")
    vectors = Vectors(100)
    engine.execute(plan(engine), vectors.addresses, call())
    assert vectors.right()
    assert toolchain.compiled == 2
    assert engine.statistics.snapshot().artifacts_quarantined == 1


@pytest.mark.extended
def test_full_disk_is_told_and_over_when_there_is_room(make_engine: Any, tmp_path: Path) -> None:
    engine = make_engine(cache_dir=tmp_path / "cache")
    engine.devices.get()

    class Full(Files):
        def write(self, path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "full")

    engine.cache.files = Full()
    with pytest.raises(ResourceExhaustedError) as caught:
        plan(engine)
    assert caught.value.rule == "cache_full"
    engine.cache.files = Files()
    assert plan(engine).kernels == (BEST,)
