"""Journals: what was asked for, how often, whatever happened to the file."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.planning.journal import Journal, read_journal
from tilewright_server.engine.types import Selection

DEVICE = DeviceInfo("cpu:0", "cpu", "one", tilewright_arch.load("x86-64-v3"), 2, 1 << 30)
MANY = 1 << 20


def request(m: int, **attributes: object) -> OperationRequest:
    desc = TensorDesc.of("bf16", (m, 8), (1, m))
    return OperationRequest("gemm", {"a": desc, "b": TensorDesc.of("fp8", (8, 4))}, {"out": desc}, attributes)  # type: ignore[arg-type]


def counts(path: Path) -> dict[int, int]:
    return {item.request.inputs["a"].shape[0]: item.count for item in read_journal(path)[0]}


def test_a_request_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", MANY)
    asked = request(3, clamp_lo=float("-inf"), alpha=0.5, on=True, pads=(1, 2), name="x", rates=(0.5, float("nan")))
    journal.note(asked, Selection("heuristic", "a kernel", config="{}"), DEVICE)
    journal.close()
    (found,), skipped = read_journal(tmp_path / "j")
    assert repr(found.request) == repr(asked) and not skipped
    assert found.selection == Selection("heuristic", "a kernel", device="cpu:0", config="{}")
    assert (found.arch, found.count) == ("x86-64-v3", 1)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


def test_counts_are_whole_after_an_end_and_half_at_least_before(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, MANY)
    threads = [
        threading.Thread(target=lambda: [journal.note(request(m), Selection(), DEVICE) for m in (1, 2, 2) * 111])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(path) == {2: 512, 1: 256}, "what a killed server leaves"
    assert len(path.read_bytes().splitlines()) < 30
    journal.close()
    journal.close()
    assert counts(path) == {2: 666, 1: 333}
    again = Journal(path, MANY)
    again.note(request(1), Selection(), DEVICE)
    again.close()
    assert counts(path) == {2: 666, 1: 334}
    assert sum(b"request" in line for line in path.read_bytes().splitlines()) == 2


def test_a_journal_does_not_outgrow_its_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j"
    journal = Journal(path, 4000)
    for m in range(1, 100):
        journal.note(request(m), Selection(), DEVICE)
    journal.close()
    assert 3000 < path.stat().st_size <= 4000
    assert 5 < len(counts(path)) < 20
    assert sum("has reached its" in line for line in caplog.messages) == 1
    Journal(path, 4000).close()


def test_damaged_lines_are_skipped_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, MANY)
    for m in (1, 2):
        journal.note(request(m), Selection(), DEVICE)
    journal.close()
    good = path.read_bytes()
    first = json.loads(good.splitlines()[0])
    bad = [
        b"{", b"[]", b'"text"', b'{"journal": 2}', b'{"journal": 1}', b'{"journal": 1, "id": 3}', b"\xff\xfe",
        b'{"journal": 1, "id": "unknown", "count": 1}',
        json.dumps({"journal": 1, "id": first["id"], "count": -1}).encode(),
        json.dumps({"journal": 1, "id": first["id"], "count": True}).encode(),
        json.dumps({**first, "id": "n", "arch": 7}).encode(),
        json.dumps({**first, "id": "n", "request": {"operation": "gemm", "inputs": {"a": {"dtype": "fp7"}}}}).encode(),
        json.dumps({**first, "id": "n", "request": {"operation": "gemm", "attributes": {"x": {"y": 1}}}}).encode(),
        b"[" * 200_000,
        b"x" * (3 << 20),
    ]  # fmt: skip
    path.write_bytes(b"\n".join([*bad, b"", good]))
    problems, skipped = read_journal(path)
    assert len(problems) == 2 and [item.line for item in skipped] == list(range(1, len(bad) + 1))
    assert all(item.reason for item in skipped)


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, MANY)
    journal.note(request(1), Selection(), DEVICE)
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"journal": 1, "id"')
    journal = Journal(path, MANY)
    journal.note(request(2), Selection(), DEVICE)
    journal.close()
    assert counts(path) == {1: 1, 2: 1} and len(read_journal(path)[1]) == 1


def test_mutated_journals_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, MANY)
    for m in range(1, 6):
        journal.note(request(m, alpha=1.5), Selection(), DEVICE)
    journal.close()
    whole, draw, read = path.read_bytes(), random.Random(5), 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 20)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        try:
            read += len(read_journal(path)[0])
        except InvalidArgumentError as error:
            assert error.rule == "journal_format"
    assert read > 500


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cannot be read"):
        read_journal(tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        Journal(tmp_path / "no" / "folder", MANY)
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(InvalidArgumentError, match="not a journal: line 1"):
        read_journal(tmp_path / "other")
