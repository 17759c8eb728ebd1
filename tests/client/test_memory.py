import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from client_helpers import used_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.dispatch.operands.operands import address_of
from tilewright.session import regions
from tilewright.session.available_memory import available
from tilewright.session.free_ranges import GRAIN, FreeList
from tilewright.session.regions import PAGE, Pool

FP32 = np.dtype(np.float32)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000), st.sampled_from([64, 4096])), max_size=60), st.randoms())
def test_ranges_never_overlap_and_all_come_back(script: list[tuple[bool, int, int]], random: object) -> None:
    size = 1 << 16
    ranges = FreeList(size)
    taken: dict[int, int] = {}
    for release, nbytes, align in script:
        if release and taken:
            offset = random.choice(sorted(taken))  # type: ignore[attr-defined]
            ranges.free(offset)
            del taken[offset]
            continue
        found = ranges.allocate(nbytes, align)
        if found is None:
            continue
        assert found % align == 0
        assert found % GRAIN == 0
        assert found + nbytes <= size
        assert all(found + nbytes <= start or start + length <= found for start, length in taken.items())
        taken[found] = max(nbytes, 1)
    for offset in list(taken):
        ranges.free(offset)
    assert ranges.used == 0
    assert ranges.allocate(size) == 0, "one range again"


def test_freeing_twice_is_an_error() -> None:
    ranges = FreeList(4096)
    offset = ranges.allocate(10)
    assert offset is not None
    ranges.free(offset)
    with pytest.raises(KeyError):
        ranges.free(offset)


def test_memory_is_free_when_the_array_and_all_views_are_gone() -> None:
    pool = Pool(1 << 20)
    array = pool.empty((64, 64), FP32)
    view = array[3:].T
    del array
    gc.collect()
    assert used_bytes(pool) == 64 * 64 * 4
    del view
    gc.collect()
    assert used_bytes(pool) == 0
    pool.close()


def test_freed_memory_is_used_again() -> None:
    pool = Pool(1 << 20)
    first = address_of(pool.empty((100,), FP32))
    assert address_of(pool.empty((100,), FP32)) == first
    assert pool.total_bytes == 1 << 20
    pool.close()


def test_views_are_found_by_address_and_strangers_are_not() -> None:
    pool = Pool(1 << 20)
    array = pool.empty((64, 64), FP32)
    segment, offset = pool.find(address_of(array), array.nbytes) or pytest.fail("not found")
    assert pool.find(address_of(array[3:]), 4) == (segment, offset + 3 * 256)
    assert pool.find(address_of(np.zeros(4)), 4) is None
    assert pool.find(segment.address, segment.size + 1) is None
    pool.close()


def test_large_arrays_begin_on_a_page_and_get_segments_of_their_own() -> None:
    pool = Pool(1 << 20, keep_bytes=0)
    array = pool.empty((3 << 20,), np.dtype(np.int8))
    assert address_of(array) % PAGE == 0
    assert pool.total_bytes >= 3 << 20
    del array
    gc.collect()
    pool.trim()
    assert pool.total_bytes == 0
    assert len(pool.take_retired()) == 1
    pool.close()


def test_arrays_outlive_the_pool() -> None:
    pool = Pool(1 << 20)
    array = pool.empty((4,), FP32)
    array[:] = 7
    pool.close()
    assert array.sum() == 28


def test_segments_cannot_be_shrunk() -> None:
    pool = Pool(1 << 20)
    array = pool.empty((4,), FP32)
    segment, _ = pool.find(address_of(array), 4) or pytest.fail("not found")
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    pool.close()


UNKNOWN_ADVICE = 9999
"""Advice that no kernel knows, as an old kernel does not know the advice to populate."""


@pytest.mark.parametrize("old_kernel", [False, True])
def test_pages_of_an_array_are_there_before_it_is_shared(old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old_kernel:
        monkeypatch.setattr(regions, "_POPULATE_WRITE", UNKNOWN_ADVICE)
    pool = Pool(16 << 20)
    for shape in ((5,), (1 << 20,), (5 << 20,)):  # the last is in a segment of its own
        array = pool.empty(shape, FP32)
        segment, offset = pool.find(address_of(array), array.nbytes) or pytest.fail("not found")
        assert segment.touched >= offset + array.nbytes
        assert os.fstat(segment.fd).st_blocks * 512 >= segment.touched
    pool.close()


def test_an_array_whose_pages_cannot_be_had_is_refused_and_its_range_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_POPULATE_WRITE", UNKNOWN_ADVICE)
    pool = Pool(16 << 20)
    array = pool.empty((4,), FP32)
    segment, _ = pool.find(address_of(array), 4) or pytest.fail("not found")
    used = used_bytes(pool)
    segment.close()
    with pytest.raises(tw.ResourceExhaustedError) as caught:
        pool.empty((2 << 20,), FP32)
    assert caught.value.rule == "shared_memory"
    assert used_bytes(pool) == used
    pool.close()


def test_impossible_sizes_are_refused() -> None:
    pool = Pool()
    with pytest.raises(tw.InvalidArgumentError):
        pool.empty((1 << 40, 1 << 40), FP32)
    pool.close()


def test_threads_share_a_pool() -> None:
    pool = Pool(1 << 20)
    wrong: list[int] = []

    def work(number: int) -> None:
        for size in range(1, 200):
            array = pool.empty((size * 7,), FP32)
            array.fill(number)
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert used_bytes(pool) == 0
    pool.close()


def test_more_than_the_machine_has_is_refused_before_any_page_is_used() -> None:
    pool = Pool(1 << 20)
    with pytest.raises(tw.ResourceExhaustedError) as caught:
        pool.empty((1 << 48,), np.dtype(np.uint8))
    assert (caught.value.field, caught.value.rule) == ("nbytes", "shared_memory")
    assert caught.value.fix
    assert pool.total_bytes == 0
    assert pool.empty((8,), FP32).shape == (8,)


def test_where_nothing_tells_how_much_there_is_the_system_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.session.regions.available", lambda: available(Path("/nowhere")))
    assert Pool(1 << 20).empty((8,), FP32).shape == (8,)


def test_more_than_the_container_has_left_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {**MACHINE, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(60 * MIB)}
    system(tmp_path, {**machine, "sys/fs/cgroup/memory.current": str(40 * MIB)})
    monkeypatch.setattr("tilewright.session.regions.available", lambda: available(tmp_path))
    pool = Pool(1 << 20)
    with pytest.raises(tw.ResourceExhaustedError, match=f"{30 * MIB} that are left"):
        pool.empty((31 * MIB,), np.dtype(np.uint8))
    assert pool.empty((27 * MIB,), np.dtype(np.uint8)).nbytes == 27 * MIB


# What is left, of a machine with 100 MiB free and 10 MiB of swap

MIB = 1 << 20
MACHINE = {"proc/meminfo": f"MemTotal: 500000 kB\nMemAvailable: {100 << 10} kB\nSwapFree: {10 << 10} kB\n"}


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, **sizes: int | str) -> dict[str, str]:
    """Files of a group: a double underscore stands for a dot; numbers are MiB."""
    return {
        f"sys/fs/cgroup/{folder}/{name.replace('__', '.')}": str(size * MIB if isinstance(size, int) else size)
        for name, size in sizes.items()
    }


LIMITED = {"memory__max": 80, "memory__current": 50, "memory__swap__max": 0}
OLD = {"memory__limit_in_bytes": 60, "memory__usage_in_bytes": 50}
NO_LIMIT = str((1 << 63) - 4096)


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("", {}, 110),
        ("0::/\n", {}, 110),
        ("0::/box\n", group("box", memory__max="max", memory__current=50), 110),
        ("0::/box\n", group("box", **LIMITED), 30),
        ("0::/box/inner\n", group("box", **LIMITED), 30),
        ("0::/not/seen/from/here\n", group(".", **LIMITED), 30),
        ("0::/box\n", group("unified/box", **LIMITED), 30),
        ("0::/box\n", group("box", memory__max=80, memory__current=50), 40),
        ("0::/box\n", group("box", **LIMITED) | group("box", memory__swap__max=7, memory__swap__current=3), 34),
        ("0::/box\n", group("box", **LIMITED, memory__stat=f"inactive_file {4 * MIB}\nactive_file {MIB}\n"), 35),
        ("0::/box\n", group("box", memory__max=80, memory__current=95), 0),
        ("0::/box\n", group("box", memory__max=800, memory__current=50), 110),
        ("9:cpu:/a\n4:memory:/a/b\n", group("memory/a/b", **OLD), 20),
        ("4:memory:/a/b\n", group("memory", **OLD), 20),
        ("4:memory:/b\n", group("memory/b", **OLD, memory__stat=f"total_inactive_file {2 * MIB}\n"), 22),
        (
            "4:memory:/b\n",
            group("memory/b", **OLD, memory__memsw__limit_in_bytes=64, memory__memsw__usage_in_bytes=50),
            14,
        ),
        ("4:memory:/b\n", group("memory/b", memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes=50), 110),
    ],
)
def test_what_is_left_is_the_least_of_the_machine_and_of_every_group(
    groups: str, files: dict[str, str], left: int, tmp_path: Path
) -> None:
    system(tmp_path, {**MACHINE, "proc/self/cgroup": groups, **files})
    assert available(tmp_path) == left * MIB
