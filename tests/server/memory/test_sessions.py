"""Sessions and what they own, without a server around them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeDevice
from rpc_harness import MemoryFile, register

from tilewright_kit.types.errors import AccessError, DeadlineError, NotFoundError, ResourceExhaustedError
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.shm import OpenedFile, open_memfd
from tilewright_server.session.objects import new_id
from tilewright_server.session.quotas import Limits, Quotas, Resource
from tilewright_server.session.request_cache import MEMO_BYTES
from tilewright_server.session.sessions import Sessions


def descriptors() -> int:
    """How many of this process lead to memory files; other tests of it may be closing others."""
    found = 0
    for item in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(item.readlink()).startswith("/memfd:tilewright-")
    return found


def mapped(file: MemoryFile) -> int:
    return Path("/proc/self/maps").read_text().count(file.name)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(Limits(regions=2, buffers=2, buffer_bytes=1000, plans=2), Quotas({Resource.SESSIONS: 6}))


@pytest.fixture(params=[True, False], ids=["sealed", "unsealed"])
def file(request: pytest.FixtureRequest) -> Iterator[MemoryFile]:
    made = MemoryFile(4096, sealed=request.param)
    yield made
    made.close()


def test_ids_never_come_twice_and_are_never_zero() -> None:
    ids = {new_id() for _ in range(100_000)}
    assert len(ids) == 100_000
    assert 0 not in ids
    assert max(ids) < 2**64


def test_tokens_have_128_random_bits(sessions: Sessions) -> None:
    tokens = {sessions.open("", local=True).token for _ in range(3)}
    assert len(tokens) == 3
    assert {len(token) for token in tokens} == {16}


def test_closing_a_session_frees_what_is_idle_at_once(sessions: Sessions, file: MemoryFile) -> None:
    before, maps = descriptors(), mapped(file)
    session = sessions.open("", local=True)
    register(session, file)
    device = FakeDevice()
    session.create_buffer(100, lambda size: ResidentBuffer(device, size), on_host=True)
    sessions.close(session)
    sessions.close(session)
    assert (descriptors(), mapped(file), device.live) == (before, maps, {})
    with pytest.raises(NotFoundError):
        sessions.get(session.token)
    with pytest.raises(NotFoundError):
        session.create_buffer(1, lambda size: ResidentBuffer(device, size), on_host=True)
    with pytest.raises(NotFoundError):
        register(session, file)
    assert (descriptors(), mapped(file), device.live) == (before, maps, {})


def test_what_is_pinned_goes_with_the_last_pin(sessions: Sessions, file: MemoryFile) -> None:
    before, maps = descriptors(), mapped(file)
    session = sessions.open("", local=True)
    region = register(session, file)
    session.pin((region,))
    session.pin((region, region))
    sessions.close(session)
    region.write(0, memoryview(b"still here"))
    session.unpin((region,))
    assert file.bytes[:10] == b"still here"
    with pytest.raises(NotFoundError):
        session.pin((region,))
    assert not session.wait_released(0.01)
    session.unpin((region, region))
    assert session.wait_released(0)
    assert (descriptors(), mapped(file)) == (before, maps)


def test_pinning_is_all_or_nothing(sessions: Sessions) -> None:
    session = sessions.open("", local=True)
    files = MemoryFile(4096), MemoryFile(4096)
    one, two = (register(session, item) for item in files)
    session.unregister(two.id)
    with pytest.raises(NotFoundError):
        session.pin((one, two))
    assert one.pins == 0
    sessions.close(session)
    for item in files:
        item.close()


def test_ending_waits_for_the_last_pin_or_the_deadline(sessions: Sessions, file: MemoryFile) -> None:
    session = sessions.open("", local=True)
    region = register(session, file)
    session.pin((region,))
    with pytest.raises(DeadlineError):
        session.unregister(region.id, time.monotonic() + 0.05)
    with pytest.raises(NotFoundError):
        session.unregister(region.id)
    session.unpin((region,))
    assert session.wait_released(0)
    again = register(session, file)
    session.pin((again,))
    begin = time.monotonic()
    threading.Timer(0.1, session.unpin, [(again,)]).start()
    session.unregister(again.id)
    assert time.monotonic() - begin > 0.05
    sessions.close(session)


def test_a_file_is_anothers_until_its_last_region_is_gone(sessions: Sessions, file: MemoryFile) -> None:
    first, second = sessions.open("", local=True), sessions.open("", local=True)
    regions = [register(first, file) for _ in range(2)]
    before, maps = descriptors(), mapped(file)
    with pytest.raises(NotFoundError):
        register(second, file)
    assert (descriptors(), mapped(file)) == (before, maps)
    first.unregister(regions[0].id)
    with pytest.raises(NotFoundError):
        register(second, file)
    sessions.close(first)
    register(second, file)
    sessions.close(second)


def test_quotas_count_what_is_there(sessions: Sessions) -> None:
    session = sessions.open("", local=True)
    device = FakeDevice()

    def create(nbytes: int) -> ResidentBuffer:
        return session.create_buffer(nbytes, lambda size: ResidentBuffer(device, size), on_host=True)

    buffer = create(900)
    with pytest.raises(ResourceExhaustedError):
        create(101)
    with pytest.raises(ResourceExhaustedError):
        session.create_buffer(50, _no_memory, on_host=True)
    session.free_buffer(buffer.id)
    create(1000)
    for _ in range(2):
        session.add_plan(object())
    with pytest.raises(ResourceExhaustedError):
        session.add_plan(object())
    sessions.close(session)
    assert not device.live
    for _ in range(3):
        sessions.open("", local=True)
    with pytest.raises(ResourceExhaustedError):
        sessions.open("", local=True)


def test_quotas_hold_for_requests_at_the_same_time() -> None:
    """What is made takes a while, and is counted when it is there."""
    session = Sessions(Limits(regions=2, buffers=2)).open("", local=True)
    device, together = FakeDevice(), threading.Barrier(5, timeout=60)
    files = [MemoryFile(4096) for _ in range(5)]
    before = descriptors()

    def region(number: int) -> object:
        source = files[number].source()

        def opened() -> OpenedFile:
            together.wait()
            return open_memfd(source.pid, source.fd, source.name, 4096)

        return session.register(opened)

    def buffer(_: int) -> object:
        def allocate(size: int) -> ResidentBuffer:
            together.wait()
            return ResidentBuffer(device, size)

        return session.create_buffer(8, allocate, on_host=True)

    for make in (region, buffer):
        with ThreadPoolExecutor(5) as threads:
            made = [threads.submit(make, number) for number in range(5)]
        refused = [item.exception() for item in made if item.exception() is not None]
        assert len(made) - len(refused) == 2
        assert {type(error) for error in refused} == {ResourceExhaustedError}
    assert len(device.live) == 2
    session.close()
    assert not device.live
    assert descriptors() == before
    for file in files:
        file.close()


class Stubborn(ResidentBuffer):
    """Cannot be given back, for a reason that nobody thought of."""

    def release(self) -> None:
        super().release()
        raise BufferError("exported pointers exist")


def test_what_cannot_be_given_back_does_not_keep_the_rest(sessions: Sessions) -> None:
    session, device, told = sessions.open("", local=True), FakeDevice(), list[int]()

    def watcher(number: int) -> None:
        told.append(number)
        raise RuntimeError("a watcher that fails")

    for number in range(3):
        session.on_close(partial(watcher, number))
    for _ in range(2):
        session.create_buffer(10, lambda size: Stubborn(device, size), on_host=True)
    session.close()
    assert sorted(told) == [0, 1, 2], "every watcher hears of the end"
    assert not device.live
    assert session.wait_released(0)


def _no_memory(_: int) -> ResidentBuffer:
    raise ResourceExhaustedError("none left")


def test_another_file_under_the_number_that_was_looked_at_is_not_opened(
    file: MemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, really_open = MemoryFile(4096), os.open
    source = file.source()

    def swapped(path: Any, *flags: Any) -> int:
        os.dup2(other.fd, source.fd)
        return really_open(path, *flags)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(NotFoundError):
        open_memfd(source.pid, source.fd, source.name, 4096)
    other.close()


def test_usage_is_the_sum_of_all_sessions(sessions: Sessions, file: MemoryFile) -> None:
    session = sessions.open("", local=True)
    device = FakeDevice()
    register(session, file)
    session.create_buffer(100, lambda size: ResidentBuffer(device, size), on_host=True)
    usage = sessions.usage()
    assert (usage.sessions, usage.regions, usage.region_bytes) == (1, 1, 4096)
    assert (usage.buffers, usage.buffer_bytes) == (1, 100)
    assert sessions.close_all(timeout=30)
    assert sessions.usage().sessions == 0


def test_remote_sessions_cannot_share_memory(sessions: Sessions, file: MemoryFile) -> None:
    with pytest.raises(AccessError) as caught:
        register(sessions.open("", local=False), file)
    assert caught.value.fix


def test_what_was_remembered_is_forgotten_when_anything_ends(sessions: Sessions, file: MemoryFile) -> None:
    session = sessions.open("", local=True)
    device = FakeDevice()
    region = register(session, file)
    buffer = session.create_buffer(10, lambda size: ResidentBuffer(device, size), on_host=True)
    plan = session.add_plan(object())
    ends = (
        lambda: session.unregister(region.id),
        lambda: session.free_buffer(buffer.id),
        lambda: session.release_plan(plan),
    )
    for end in ends:
        epoch = session.epoch
        session.remember(b"request", "resolved", 1, epoch)
        assert session.memo
        end()
        assert not session.memo
        session.remember(b"request", "resolved before the end", 1, epoch)
        assert not session.memo
    sessions.close(session)
    session.remember(b"request", "resolved", 1, session.epoch)
    assert not session.memo


def test_memory_of_requests_is_bounded(sessions: Sessions) -> None:
    session = sessions.open("", local=True)
    for number in range(5000):
        session.remember(number.to_bytes(4, "little"), number, 99_996, session.epoch)
    assert 0 < len(session.memo) <= MEMO_BYTES // 100_000
    session.remember(b"much", 0, MEMO_BYTES, session.epoch)
    assert b"much" not in session.memo


def test_memory_of_plans_is_bounded() -> None:
    session = Sessions(Limits(plan_bytes=1000)).open("", local=True)
    first = session.add_plan("first", 600)
    with pytest.raises(ResourceExhaustedError) as caught:
        session.add_plan("second", 600)
    assert "release" in caught.value.fix
    session.release_plan(first)
    session.add_plan("second", 600)
