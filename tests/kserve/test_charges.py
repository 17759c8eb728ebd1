"""Charges for pages that the server has made in objects of clients, until the pages are gone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.kserve.charges import Charge, Debts
from tilewright_server.memory.populated import holes_in
from tilewright_server.memory.regions import Region
from tilewright_server.memory.shm import open_object
from tilewright_server.session.quotas import Account, Quotas, Resource

KIND = Resource.KSERVE_REGION_BYTES
PAGE = mmap.PAGESIZE
SIZE = 16 * PAGE


@pytest.fixture
def path() -> Iterator[Path]:
    made = Path(f"/dev/shm/tilewright_charge_{os.getpid()}")
    with made.open("wb") as file:
        file.truncate(SIZE)
    yield made
    made.unlink(missing_ok=True)


@pytest.fixture
def debts() -> Iterator[Debts]:
    made = Debts()
    yield made
    made.close()


@pytest.fixture
def account() -> Account:
    """One process has three times ``SIZE``."""
    return Account(Quotas({KIND: 7 * SIZE - PAGE}), Client("uid:1", "pid:1@1", b""))


def held(account: Account) -> int:
    return account.quotas.held(KIND)


def region(path: Path, account: Account, debts: Debts) -> Region:
    opened = open_object(path.name, SIZE, os.geteuid())
    with debts.taken_over(opened.fd, opened.inode) as owed:
        charge = Charge(account, SIZE, debts)
        return Region(replace(opened, filled=owed, on_release=charge.end))


def test_pages_that_were_made_are_owed_until_the_object_is_gone(path: Path, account: Account, debts: Debts) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as client:
        client[0] = 1
        made = region(path, account, debts)
        assert held(account) == SIZE
        for _ in range(3):
            made.write(0, memoryview(bytes(3 * PAGE + 1)))  # into one page of the client's and three holes
        made.release()
        assert held(account) == 3 * PAGE
        path.unlink()
        debts.look()
        assert held(account) == 3 * PAGE  # its owner has it mapped
    debts.look()
    assert (held(account), len(debts)) == (0, 0)


def test_nothing_is_owed_for_pages_that_the_client_made(path: Path, account: Account, debts: Debts) -> None:
    path.write_bytes(bytes(SIZE))
    made = region(path, account, debts)
    made.write(0, memoryview(bytes(SIZE)))
    made.release()
    assert (held(account), len(debts)) == (0, 0)


def test_an_object_that_is_registered_again_is_charged_once(path: Path, account: Account, debts: Debts) -> None:
    for _ in range(3):
        made = region(path, account, debts)
        assert held(account) == SIZE
        made.write(0, memoryview(bytes(2 * PAGE)))
        made.release()
        assert (held(account), len(debts)) == (2 * PAGE, 1)
    os.truncate(path, PAGE)
    debts.look()
    assert held(account) == PAGE
    os.truncate(path, 0)
    debts.look()
    assert (held(account), len(debts)) == (0, 0)


def test_an_object_that_cannot_be_registered_again_is_owed_for_as_before(
    path: Path, account: Account, debts: Debts
) -> None:
    made = region(path, account, debts)
    made.write(0, memoryview(bytes(2 * PAGE)))
    made.release()
    account.take(KIND, 3 * SIZE - 2 * PAGE)
    with pytest.raises(ResourceExhaustedError):
        region(path, account, debts)
    assert (held(account), len(debts)) == (3 * SIZE, 1)


def test_an_object_that_has_just_gone_makes_room_at_once(path: Path, account: Account, debts: Debts) -> None:
    made = region(path, account, debts)
    made.write(0, memoryview(bytes(SIZE)))
    made.release()
    account.take(KIND, 2 * SIZE)
    path.unlink()
    Charge(account, SIZE, debts).end()
    assert (held(account), len(debts)) == (2 * SIZE, 0)


def test_holes_are_counted_by_pages(path: Path) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"x", 4 * PAGE)
        os.pwrite(file.fileno(), b"x", 6 * PAGE)
        counts = [(0, SIZE, 14), (4 * PAGE, PAGE, 0), (4 * PAGE + 8, PAGE, 1), (3 * PAGE + 1, 4 * PAGE, 3)]
        for offset, nbytes, pages in [*counts, (15 * PAGE, 5 * PAGE, 1), (SIZE, PAGE, 0)]:
            assert holes_in(file.fileno(), offset, nbytes) == pages * PAGE, (offset, nbytes)
