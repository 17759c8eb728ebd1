"""The bugs of ``make planted`` can be planted, and their tests are there. That they are caught is its own run's."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]

from passed import FILES, reads  # noqa: E402

from tests.planted.__main__ import BUGS  # noqa: E402


def test_every_bug_has_its_place_once() -> None:
    assert [bug.kind for bug in BUGS if (ROOT / bug.file).read_text().count(bug.old) != 1] == []


def test_every_bug_has_tests_that_are_there() -> None:
    for bug in BUGS:
        paths = [word for word in shlex.split(bug.tests) if word.startswith("tests/")]
        assert paths and all((ROOT / path.partition("::")[0]).exists() for path in paths), bug.kind


def test_tests_that_passed_before_run_again_with_a_bug() -> None:
    """A bug changes the digest of all recorded tests that must find it (``tests/kernels/passed.py``)."""
    met = 0
    for bug in BUGS:
        paths = [word.partition("::")[0] for word in shlex.split(bug.tests) if word.startswith("tests/")]
        for file in (file for file in FILES if any(Path(file).is_relative_to(path) for path in paths)):
            assert any(Path(bug.file).is_relative_to(place) for place in reads(file)), (bug.kind, file)
            met += 1
    assert met >= 20


def test_there_are_many_kinds_in_each_part() -> None:
    assert len({bug.kind for bug in BUGS}) == len(BUGS) >= 40
    parts = ("client:", "server:", "kit:", "CPU:", "GPU:", "AMD, waits", "AMD, fences", "AMD, lanes", "AMD, strides")
    for part in (*parts, "AMD, tails", "AMD, swizzles", "emulator:"):
        assert any(bug.kind.startswith(part) for bug in BUGS), part
