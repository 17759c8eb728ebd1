"""Quotas by principal and process, and what the kernel proves of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.clients.client import Client, Priority
from tilewright_server.session import processes
from tilewright_server.session.processes import is_known, process_client, proved_process
from tilewright_server.session.quotas import Account, Limits, Quotas, Resource
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions

PLANS = Resource.PLANS


def client(process: str, principal: str = "uid:1") -> Client:
    return Client(principal, process, b"")


def most(quotas: Quotas, who: Client) -> int:
    """Units that a client is given before it is refused."""
    count = 0
    while True:
        try:
            quotas.take(PLANS, who)
        except ResourceExhaustedError:
            return count
        count += 1


def test_each_process_leaves_half_of_the_rest_to_the_next() -> None:
    quotas = Quotas({PLANS: 64})
    assert [most(quotas, client(name)) for name in "abcd"] == [28, 14, 7, 4]
    assert most(quotas, client("x", "uid:2")) == 11  # others have what no principal may take, and may take it all
    assert quotas.held(PLANS) == 28 + 14 + 7 + 4 + 11


@pytest.mark.parametrize("resource", list(Resource))
def test_a_process_has_half_at_most_whether_bit_by_bit_or_at_once(resource: Resource) -> None:
    for amounts in ([28], [27, 1], [1] * 28, [20, 8]):
        quotas = Quotas({resource: 64})  # of which 56 are for one principal
        for amount in amounts:
            quotas.take(resource, client("a"), amount)
        with pytest.raises(ResourceExhaustedError, match="may hold 28"):
            quotas.take(resource, client("a"))
    for amount in (29, 40, 56):
        with pytest.raises(ResourceExhaustedError, match="holds 0, and may hold 28") as never:
            Quotas({resource: 64}).take(resource, client("a"), amount)
        assert never.value.retry_after_s is None
    quotas = Quotas({resource: 64})
    quotas.take(resource, client("a"), 28)
    with pytest.raises(ResourceExhaustedError, match="may hold 14") as now:
        quotas.take(resource, client("b"), 15)
    assert now.value.retry_after_s
    quotas.take(resource, client("b"), 14)


def test_a_refusal_names_the_quota_its_value_and_who_holds_it() -> None:
    quotas = Quotas({PLANS: 16})
    quotas.take(PLANS, client("a"), 7)
    with pytest.raises(ResourceExhaustedError) as error:
        quotas.take(PLANS, client("a"))
    assert (error.value.field, error.value.value, error.value.rule) == ("plans", "16", "quota")
    assert "this client's process holds 7" in error.value.reason
    assert error.value.retry_after_s
    quotas.take(PLANS, client("b"), 3)
    quotas.take(PLANS, client("c", "uid:2"), 6)
    with pytest.raises(ResourceExhaustedError, match="all clients together hold 16"):
        quotas.take(PLANS, client("d"))


def test_what_is_given_back_can_be_taken() -> None:
    quotas = Quotas({PLANS: 16})
    for _ in range(100):
        quotas.take(PLANS, client("a"), 7)
        quotas.give(PLANS, client("a"), 7)
    assert quotas._held == {}


def test_an_account_moves_to_the_process_that_it_is_of() -> None:
    quotas = Quotas({PLANS: 16})
    account = Account(quotas, client("connection:unix:"))
    account.take(PLANS, 5)
    account.move(client("pid:1@2"))
    assert most(quotas, client("pid:1@2")) == 2
    account.give(PLANS, 5)
    assert quotas.held(PLANS) == 2


def test_calls_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tilewright_server.session.quotas.time.monotonic", lambda: now[0])
    quotas = Quotas(call_rate=4)
    for _ in range(4):
        quotas.called(client("a"))
    with pytest.raises(ResourceExhaustedError) as error:
        quotas.called(client("a"))
    assert error.value.field == "call_rate" and error.value.retry_after_s == pytest.approx(0.25)
    quotas.called(client("b"))
    now[0] += 0.25
    quotas.called(client("a"))


def test_a_principal_makes_twice_as_many_calls_as_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tilewright_server.session.quotas.time.monotonic", lambda: now[0])
    quotas = Quotas(call_rate=4)
    for name in "aabbccdd":
        quotas.called(client(name))
    with pytest.raises(ResourceExhaustedError, match="user make more than 8 calls") as error:
        quotas.called(client("e"))
    assert error.value.retry_after_s == pytest.approx(0.125)
    quotas.called(client("a", "uid:2"))
    now[0] += 0.125
    quotas.called(client("e"))
    with pytest.raises(ResourceExhaustedError, match="user make"):
        quotas.called(client("e"))
    now[0] += 10
    for _ in range(4):  # a refused call costs a process nothing
        quotas.called(client("e"))


def test_many_processes_give_nobody_a_new_rate_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of the process that called longest ago are forgotten, and no others."""
    monkeypatch.setattr("tilewright_server.session.quotas.time.monotonic", lambda: 100.0)
    monkeypatch.setattr("tilewright_server.session.quotas.MOST_RATES", 4)
    quotas = Quotas(call_rate=2)
    for name in ("idle", "busy", "x", "y", "busy", "new", "newer"):
        quotas.called(client(name, f"uid:{name}"))
    assert [process for _, process in quotas._processes] == ["y", "busy", "new", "newer"]
    with pytest.raises(ResourceExhaustedError):
        quotas.called(client("busy", "uid:busy"))


@pytest.mark.parametrize(
    ("quota", "value", "held", "ask"),
    [
        ("plans", "2", 2, lambda session: session.add_plan(object())),
        ("plan_bytes", "9", 8, lambda session: session.add_plan(object(), 2)),
        ("buffer_bytes", "7", 0, lambda session: session.create_buffer(8, int, on_host=True)),
    ],
)
def test_a_quota_of_a_session_says_who_holds_it_and_promises_no_time(
    quota: str, value: str, held: int, ask: Callable[[Session], object]
) -> None:
    limits = Limits(plans=2 if quota == "plans" else 9, plan_bytes=9, buffer_bytes=7)
    session = Sessions(limits, Quotas()).open("", local=True, client=client("a"))
    for _ in range(2):
        session.add_plan(object(), 4)
    with pytest.raises(ResourceExhaustedError, match=f"in a session: this one holds {held}") as error:
        ask(session)
    assert (error.value.field, error.value.value, error.value.rule) == (quota, value, "session_quota")
    assert error.value.retry_after_s is None


def test_a_session_gives_everything_back() -> None:
    quotas = Quotas({Resource.SESSIONS: 8, PLANS: 8})
    sessions = Sessions(Limits(), quotas)
    stranger = client("connection:unix:").at_most(Priority.BATCH)
    session = sessions.open("", local=True, client=stranger)
    session.add_plan(object())
    released = session.add_plan(object())
    session.release_plan(released)
    session.identify(client("pid:1@2"))
    assert session.client == Client("uid:1", "pid:1@2", session.token, Priority.BATCH)
    session.identify(client("pid:3@4"))
    assert session.client.process == "pid:1@2"
    assert quotas.held(PLANS) == quotas.held(Resource.SESSIONS) == 1
    sessions.close(session)
    sessions.close(session)
    assert quotas._held == {}


def test_a_process_is_its_number_and_its_start() -> None:
    own = process_client(os.getpid())
    assert own is not None and own.principal == f"uid:{os.geteuid()}" and is_known(own)
    assert own.process.startswith(f"pid:{os.getpid()}@") and own == process_client(os.getpid(), os.geteuid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = process_client(child.pid)
        assert other is not None and other.process != own.process
        child.kill()
    assert process_client(child.pid) is None


def test_only_the_maker_of_a_memory_file_can_prove_a_process() -> None:
    name = "tilewright-" + "5" * 32
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        assert proved_process(f"{os.getpid()}:{fd}:{name}") == process_client(os.getpid())
        for wrong in ("", "x", f"{os.getpid()}:{fd}:{name[:-1]}6", f"{os.getpid()}:0:{name}", f"1:{fd}:{name}",
                      f"{os.getpid()}:{fd}:../{name}", f"-1:{fd}:{name}", f"{'9' * 40}:{fd}:{name}"):  # fmt: skip
            assert proved_process(wrong) is None, wrong
    finally:
        os.close(fd)
    assert proved_process(f"{os.getpid()}:{fd}:{name}") is None


def test_a_name_of_a_program_does_not_fool_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "7" / "ns" / "pid").touch()
    (tmp_path / "self" / "ns" / "pid").hardlink_to(tmp_path / "7" / "ns" / "pid")
    (tmp_path / "7" / "stat").write_text("7 (a) b) 1 2 (c) S " + " ".join(str(number) for number in range(4, 60)))
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert process_client(7, 3) == Client("uid:3", "pid:7@22", b"")
    (tmp_path / "self" / "ns" / "pid").unlink()
    (tmp_path / "self" / "ns" / "pid").touch()
    other = process_client(7, 3)
    assert other is not None and other.principal.startswith("uid:3@")
