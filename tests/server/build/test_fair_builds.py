"""Which build is next, and which are given up: one compiler at a time, held by a gate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, CancelledError, ResourceExhaustedError
from tilewright_server.build.build import Build
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildPool, PoolOptions
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.clients.client import Client, Priority
from tilewright_server.engine.call import Call

Unit = Callable[..., SourceUnit]
AUTHOR = Client("uid:1", "author", b"1")
OTHER = Client("uid:1", "other", b"2")
BULK = AUTHOR.at_most(Priority.BATCH)


class Gated:
    """A pool with one worker whose compiler waits until ``open``; ``order`` tells what it compiled."""

    def __init__(self, pool: BuildPool, folder: Path, unit: Unit, arch: ArchSpec) -> None:
        self.pool = pool
        self._folder = folder
        self._unit = unit
        self._arch = arch

    def submit(self, number: int, client: Client, *, held: bool = True) -> Build:
        build = self.pool.submit(self._unit(number), self._arch, client=client, held=held)
        if number == 0:  # the one that holds the compiler
            for _ in range(2000):
                if build.state == "building" and self.order():
                    break
                time.sleep(0.005)
        return build

    def open(self) -> None:
        (self._folder / "gate").touch()

    def order(self) -> list[int]:
        file = self._folder / "order"
        return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def gated(
    cache: ArtifactCache, fake, fake_toolchain: CpuToolchain, tmp_path: Path, unit: Unit, arch: ArchSpec
) -> Iterator[Gated]:
    real = fake.path.read_text().splitlines()[-1]
    wait = f"while [ ! -e {tmp_path}/gate ]; do sleep 0.01; done"
    fake.behave(f"grep -o 'return [0-9]*' kernel.cpp >> {tmp_path}/order\n{wait}\n{real}")
    pool = BuildPool(cache, {"c++": fake_toolchain}, PoolOptions(workers=1, queue_limit=40))
    yield Gated(pool, tmp_path, unit, arch)
    pool.close()


def finish(builds: list[Build]) -> None:
    for build in builds:
        build.wait(Call.within(60))


def test_one_build_of_another_client_overtakes_a_whole_set(gated: Gated) -> None:
    builds = [gated.submit(number, AUTHOR) for number in range(4)]
    builds.append(gated.submit(100, OTHER))
    gated.open()
    finish(builds)
    assert gated.order()[:2] == [0, 100]


def test_what_a_call_waits_for_overtakes_bulk_builds_of_the_same_client(gated: Gated) -> None:
    builds = [gated.submit(number, BULK) for number in range(4)]
    builds.append(gated.submit(100, AUTHOR))
    gated.open()
    finish(builds)
    assert gated.order()[:2] == [0, 100]


def test_bulk_build_that_a_call_comes_to_wait_for_is_next(gated: Gated) -> None:
    builds = [gated.submit(number, BULK) for number in range(4)]
    assert gated.submit(3, OTHER) is builds[3]
    gated.open()
    finish(builds)
    assert gated.order()[:2] == [0, 3]
    assert sorted(gated.order()) == list(range(4))


def test_waiting_build_that_nobody_wants_any_more_is_cancelled(gated: Gated) -> None:
    builds = [gated.submit(number, BULK) for number in range(6)]
    assert gated.submit(3, OTHER) is builds[3]
    for build in builds:  # the author is gone
        gated.pool.release(build)
    with pytest.raises(CancelledError) as caught:
        builds[1].wait(Call.within(20))
    assert caught.value.rule == "build_unwanted"
    assert builds[3].state == "queued"
    gated.open()
    finish([builds[0], builds[3]])
    assert gated.order() == [0, 3]
    assert gated.submit(1, OTHER).key == builds[1].key  # and nothing is remembered against it
    assert [build.state for build in builds].count("failed") == 4


def test_build_that_somebody_wants_for_good_is_not_cancelled(gated: Gated) -> None:
    builds = [gated.submit(0, AUTHOR), gated.submit(1, AUTHOR, held=False)]
    assert gated.submit(1, OTHER) is builds[1]
    gated.pool.release(builds[1])
    gated.open()
    finish(builds)
    assert builds[1].state == "built"


def test_one_process_has_at_most_half_of_the_places(gated: Gated) -> None:
    builds = [gated.submit(0, AUTHOR)]
    with pytest.raises(ResourceExhaustedError) as caught:
        builds += (gated.submit(number, BULK) for number in range(1, 41))
    assert (len(builds), caught.value.rule, caught.value.field) == (21, "quota", "queued_builds")
    assert caught.value.retry_after_s
    builds.append(gated.submit(100, OTHER))
    assert gated.pool.waiting == 21
    for build in builds[2:21]:
        gated.pool.release(build)
    gated.submit(50, BULK)
    gated.open()
    finish([builds[0], builds[1], builds[-1]])


def test_compilers_that_no_live_call_waits_for_stand_back(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    fake.behave("sleep 0.1; nice; exit 1")
    own, found = os.getpriority(os.PRIO_PROCESS, 0), []
    for number, priority in enumerate(Priority):
        build = pool.submit(unit(number), arch, client=AUTHOR.at_most(priority))
        with pytest.raises(BuildFailedError) as caught:
            build.wait(Call.within(30))
        found.append(int(caught.value.log_tail))
    assert found == [min(own + further, 19) for further in (5, 10, 15)]


def test_a_bulk_build_that_a_call_comes_to_wait_for_does_not_stand_back(gated: Gated, fake) -> None:
    builds = [gated.submit(0, AUTHOR), gated.submit(1, BULK), gated.submit(1, OTHER)]
    fake.behave("sleep 0.1; nice; exit 1")
    gated.open()
    with pytest.raises(BuildFailedError) as caught:
        builds[2].wait(Call.within(30))
    assert int(caught.value.log_tail) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
