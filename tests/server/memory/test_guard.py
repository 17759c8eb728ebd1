"""Mappings of files of others: a page that is missing is not made, and nobody sees what stands in for it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.memory import guard
from tilewright_server.memory.shm import Mapping, view, write_from

PAGE = mmap.PAGESIZE
PART = 2 << 20
"""Bytes of a mapping that are replaced together."""


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("tilewright-guard", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def mapped(fd: int, nbytes: int) -> Mapping:
    os.ftruncate(fd, nbytes)
    mapping = Mapping(fd, nbytes)
    if not mapping.is_guarded:
        mapping.close()
        pytest.skip("the system does not allow userfaultfd, or libtilewright is not built")
    return mapping


def kept(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_hole_stays_one_and_is_told(file: int) -> None:
    mapping = mapped(file, 2 * PART + PAGE)
    os.pwrite(file, b"x" * PAGE, 0)
    seen = view(mapping.address, mapping.nbytes)
    seen[:5] = b"there"
    assert not mapping.is_spoilt and os.pread(file, 6, 0) == b"therex"
    seen[PART] = 7
    assert mapping.is_spoilt and guard.watch.counts.spoilt == 1
    seen[2 * PART + PAGE - 1] = 7
    assert (seen[PART], seen[PART + 1], seen[0]) == (7, 0, ord("t"))
    assert kept(file) == PAGE
    mapping.close()
    assert guard.watch.counts.spoilt == 0


def test_a_file_that_became_shorter_ends_nobody(file: int) -> None:
    mapping = mapped(file, 2 * PAGE)
    os.pwrite(file, bytes(2 * PAGE), 0)
    os.ftruncate(file, PAGE)
    seen = view(mapping.address, 2 * PAGE)
    seen[PAGE] = 1
    assert mapping.is_spoilt
    mapping.close()


def test_nobody_sees_what_another_one_wrote_into_a_hole(file: int) -> None:
    other = os.memfd_create("tilewright-other", os.MFD_CLOEXEC)
    first, second = mapped(file, PART), mapped(other, PART)
    view(first.address, PART)[:] = b"s" * PART
    assert bytes(view(second.address, PART)) == bytes(PART)
    first.close()
    third = mapped(file, PART)
    assert bytes(view(third.address, PART)) == bytes(PART)
    for mapping in (second, third):
        mapping.close()
    assert kept(file) == kept(other) == 0
    os.close(other)


def test_a_mapping_with_more_holes_than_there_is_room_for_goes_on(file: int) -> None:
    before = guard.watch.counts.given_up
    mapping = mapped(file, 9000 * PART)
    for at in range(0, mapping.nbytes, PART):
        view(mapping.address + at, 1)[0] = 1
    assert guard.watch.counts.given_up == before + 1
    assert mapping.is_spoilt and kept(file) == 0
    mapping.close()
    again = mapped(file, 9 * PART)
    view(again.address, 1)[0] = 1
    assert guard.watch.counts.given_up == before + 1
    again.close()


def test_a_write_into_a_file_that_may_shrink_makes_no_page(file: int) -> None:
    mapped(file, 4 * PAGE).close()
    os.pwrite(file, b"x" * PAGE, PAGE)
    write_from(file, PAGE + 8, memoryview(b"good"), fills=False)
    assert os.pread(file, 16, PAGE) == b"xxxxxxxxgoodxxxx"
    with pytest.raises(InvalidArgumentError, match="no page there"):
        write_from(file, PAGE + 8, memoryview(b"b" * PAGE), fills=False)
    assert kept(file) == PAGE
    write_from(file, PAGE + 8, memoryview(b"b" * PAGE), fills=True)
    assert kept(file) == 2 * PAGE


def test_other_touches_of_memory_that_is_gone_end_a_process_as_ever(tmp_path: Path) -> None:
    code = """
import mmap, os, sys
from tilewright_server.memory.shm import Mapping
fd = os.memfd_create("x")
os.ftruncate(fd, 8192)
Mapping(fd, 8192)
other = mmap.mmap(fd, 8192)
os.ftruncate(fd, 4096)
other[5000] = 1
"""
    env = {**os.environ, "PYTHONFAULTHANDLER": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=False)
    assert done.returncode == -signal.SIGBUS
