"""The library's interface as its header states it, and what it makes of bytes that are no plans."""

from __future__ import annotations

import ctypes
import hashlib
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tilewright.launch.library import PlanInfo
from tilewright_native import library_path

HEADER = Path(__file__).parents[3] / "native" / "runtime" / "tilewright.h"
DAMAGED, VERSION = 2, 3
DIGEST_AT, DIGEST_END = 24, 56


@pytest.fixture(scope="module")
def library() -> Any:
    try:
        return ctypes.CDLL(str(library_path()))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def opened(library: Any, data: bytes) -> int:
    plan = ctypes.c_void_p()
    status = int(library.tw_plan_open(data, ctypes.c_size_t(len(data)), ctypes.byref(plan)))
    assert bool(plan) == (status == 0)
    if plan:
        library.tw_plan_close(plan)
    return status


def empty_plan(version: int = 1, **changed: int) -> bytes:
    """A plan without operands and stages."""
    numbers = {"kind": 1, "team": 1, "operands": 0, "stages": 0, "objects": 0, "relocations": 0, "maps": 0, "pairs": 0}
    numbers |= {"dims": 0, "strings": 1}
    sizes = {"workspace": 0, "counters": 0, "flops": 0, "image": 0, "tables": 0}
    for name, value in changed.items():
        (numbers if name in numbers else sizes)[name] = value
    body = struct.pack("<10I5Q4I", *numbers.values(), *sizes.values(), 0, 0, 0, 0) + b"\0"
    body += bytes(-(DIGEST_END + len(body)) % 64)
    head = struct.pack("<8sIIQ", b"TWPLAN\0\0", version, 152, DIGEST_END + len(body))
    return head + hashlib.sha256(body).digest() + body


def test_every_function_of_the_header_is_exported(library: Any) -> None:
    names = re.findall(r"^TW_API [^;(]*?(tw_\w+)\(", HEADER.read_text(), re.M)
    assert len(names) >= 25 and all(hasattr(library, name) for name in names)
    assert not hasattr(library, "tw_pool_open"), "inner functions are not exported"


def test_versions_and_struct_sizes(library: Any) -> None:
    assert library.tw_abi_version() == 1 and library.tw_format_version() == 1
    assert ctypes.sizeof(PlanInfo) == 64


def test_plan_without_stages_opens(library: Any) -> None:
    assert opened(library, empty_plan()) == 0


@pytest.mark.parametrize("count", ["operands", "stages", "objects", "relocations", "maps", "pairs", "dims", "strings"])
@pytest.mark.parametrize("value", [100, 5000, 2**31, 2**32 - 1])
def test_counts_beyond_the_plan_are_damage(library: Any, count: str, value: int) -> None:
    assert opened(library, empty_plan(**{count: value})) == DAMAGED


def test_other_versions_and_short_plans(library: Any) -> None:
    assert opened(library, empty_plan(version=2)) == VERSION
    whole = empty_plan()
    assert all(opened(library, whole[:size]) == DAMAGED for size in range(len(whole)))


def test_changed_bytes_never_open_without_their_digest(library: Any) -> None:
    draw = random.Random(7)
    whole = empty_plan()
    for _ in range(2000):
        data = bytearray(whole)
        data[draw.randrange(DIGEST_AT, len(data))] ^= 1 << draw.randrange(8)
        assert opened(library, bytes(data)) == DAMAGED


def test_changed_bytes_with_a_digest_open_or_are_refused(library: Any) -> None:
    draw = random.Random(11)
    whole = empty_plan()
    found = set()
    for _ in range(5000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(DIGEST_END, len(data))] = draw.randrange(256)
        data[DIGEST_AT:DIGEST_END] = hashlib.sha256(data[DIGEST_END:]).digest()
        found.add(opened(library, bytes(data)))
    assert found == {0, DAMAGED}
