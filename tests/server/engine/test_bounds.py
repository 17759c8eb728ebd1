"""What a server remembers and keeps loaded stays within bounds, whatever it is asked for."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vector_operation import VectorConfig, request

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError, ResourceExhaustedError
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine, Prepared
from tilewright_server.engine.kernels.loaded import Modules
from tilewright_server.engine.lru import Lru
from tilewright_server.engine.statistics import MAX_KERNELS, OTHERS, Statistics
from tilewright_server.engine.types import Selection

KERNELS = [VectorConfig(rank=rank).name for rank in (1, 2, 3)] + [VectorConfig(rank=4, stages=2).name]


def plan(engine: Engine, n: int = 100, kernel: str = "") -> Prepared:
    return engine.plan(request(n), Selection(kernel=kernel), Call.within(60))


def runs(engine: Engine, prepared: Prepared) -> bool:
    x, y, out = np.ones(100, np.float32), np.ones(100, np.float32), np.zeros(100, np.float32)
    engine.execute(prepared, [array.ctypes.data for array in (x, y, out)], Call.within(60))
    return bool((out == 2).all())


def kernel_mappings() -> int:
    return sum("memfd:tw-kernel-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Memory


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    lru: Lru[int, str] = Lru(2)
    lru.put(1, "one")
    lru.put(2, "two")
    assert lru.get(1) == "one"
    lru.put(3, "three")
    assert (lru.get(1), lru.get(2), lru.get(3)) == ("one", None, "three")


def test_weights_are_bounded_and_what_is_too_heavy_is_not_kept() -> None:
    lru: Lru[int, str] = Lru(100, 1000)
    for number in range(50):
        lru.put(number, "", 90)
        assert lru.weight <= 1000
    assert len(lru) == 11
    assert lru.get(49) == ""
    lru.put(99, "", 600)
    assert lru.get(99) is None
    assert len(lru) == 11
    made = lru.get_or_make(7, lambda: "made")
    lru.weigh(7, made, 200)
    assert lru.weight <= 1000
    assert lru.get(7) == "made"
    lru.weigh(7, made, 900)  # it has grown
    assert lru.get(7) is None
    while lru.drop_oldest():
        pass
    assert (len(lru), lru.weight) == (0, 0)


def test_plans_are_remembered_within_a_budget(make_engine: Any) -> None:
    engine = make_engine(plan_cache_bytes=1 << 20)
    kept = [plan(engine, n) for n in range(1, 200)]
    assert 10 < engine.statistics.snapshot().plans * kept[0].nbytes <= 1 << 19
    assert plan(engine, 199) is kept[-1]
    assert plan(engine, 1) is not kept[0]
    assert make_engine(plan_cache_bytes=0).plan(request(5), Selection(), Call.within(60)).kernels


def test_refusal_that_is_remembered_keeps_nothing_of_the_request_alive(engine: Engine) -> None:
    class Vast(dict[str, Any]):
        alive = 0

        def __init__(self, *items: Any) -> None:
            super().__init__(*items)
            Vast.alive += 1

        def __del__(self) -> None:
            Vast.alive -= 1

    def refused() -> None:
        bad = OperationRequest("vector", Vast({"x": request(3).inputs["x"]}))
        with pytest.raises(InvalidArgumentError):
            engine.plan(bad, Selection(), Call.within(60))

    refused()
    gc.collect()
    assert Vast.alive == 0


def test_kernels_are_counted_by_name_up_to_a_bound() -> None:
    statistics = Statistics()
    for number in range(MAX_KERNELS + 100):
        statistics.kernel(f"{number}").launches += 1
    kernels = {item.name: item.launches for item in statistics.snapshot().kernels}
    assert len(kernels) == MAX_KERNELS + 1
    assert kernels[OTHERS] == 100


# Loaded kernels


def test_kernels_out_of_use_are_unloaded(make_engine: Any) -> None:
    engine = make_engine(max_loaded_kernels=2)
    held = plan(engine, kernel=KERNELS[0])
    start = kernel_mappings()
    for n in range(100, 105):
        for kernel in KERNELS[1:]:
            assert runs(engine, plan(engine, 100, kernel))
            plan(engine, n, kernel)
            assert engine._store.loaded <= 3
    one = start  # of the runtime and the kernel that is held
    assert kernel_mappings() <= 3 * one
    assert runs(engine, held)
    keys = {name: engine._store.unit(plan(engine, 100, name).plan.kernels[0], held.device.arch).key for name in KERNELS}
    assert not engine.cache.evict(keys[KERNELS[0]])  # in use
    plan(engine, 300, KERNELS[2])
    plan(engine, 301, KERNELS[3])
    assert engine.cache.evict(keys[KERNELS[1]])
    assert runs(engine, plan(engine, 100, KERNELS[1]))  # is built again


def test_loaded_kernel_takes_one_descriptor_and_gives_it_back(make_engine: Any) -> None:
    for kernel in KERNELS:
        plan(make_engine(), kernel=kernel)  # the cache is warm
    engine = make_engine(max_loaded_kernels=1)
    engine.devices.get()
    before, mapped = descriptors(), kernel_mappings()
    plans = [plan(engine, kernel=kernel) for kernel in KERNELS]
    assert descriptors() <= before + len(KERNELS)
    assert kernel_mappings() > mapped
    del plans
    engine._planner.forget()
    engine._store.trim()
    assert descriptors() <= before + 1
    assert kernel_mappings() <= mapped + 6


def test_kernels_of_one_name_are_told_apart(make_engine: Any) -> None:
    """Descriptors are closed after loading, so their numbers come again, in names that the loader may know already."""
    engine = make_engine()
    plans = [plan(engine, kernel=kernel) for kernel in KERNELS[:3]]
    addresses = {prepared.program._layout._functions[0][0] for prepared in plans}  # type: ignore[union-attr]
    assert len(addresses) == 3


class Fakes:
    """Modules that know whether they are loaded."""

    def __init__(self) -> None:
        self.live = 0
        self.lock = threading.Lock()

    def load(self) -> Any:
        with self.lock:
            self.live += 1
        return SimpleNamespace(unload=self.unload, function=lambda _: 1), SimpleNamespace(release=lambda: None)

    def unload(self) -> None:
        with self.lock:
            self.live -= 1


def test_modules_in_use_are_never_unloaded_and_not_without_limit() -> None:
    fakes, modules = Fakes(), Modules(2)
    held = [modules.use(("cpu:0", f"{number}"), fakes.load) for number in range(16)]
    assert fakes.live == len(modules) == 16
    with pytest.raises(ResourceExhaustedError) as caught:
        modules.use(("cpu:0", "one more"), fakes.load)
    assert "max_loaded_kernels" in caught.value.fix
    modules.use(("cpu:0", "3"), fakes.load)  # what is loaded can be used
    held.clear()
    modules.use(("cpu:0", "one more"), fakes.load)
    modules.trim()
    assert fakes.live == len(modules) == 2


def test_modules_under_threads_are_loaded_once_and_unloaded_once() -> None:
    fakes, modules = Fakes(), Modules(4)

    def work(seed: int) -> None:
        for turn in range(300):
            use = modules.use(("cpu:0", f"{(seed * 7 + turn * turn) % 12}"), fakes.load)
            assert use._loaded.users > 0
            assert modules._known[use._loaded.place] is use._loaded

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    modules.trim()
    assert fakes.live == len(modules) == 4
