"""Order of service of the fair queue, with costs that the test says."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_server.clients.fair_queue import FairQueue


@dataclass(frozen=True)
class Party:
    process: str
    principal: str = "uid:1"
    session: bytes = b""
    priority: int = 0


A, B = Party("a"), Party("b")


def served(queue: FairQueue[str], number: int, cost: int = 10) -> list[str]:
    """The next items, each of which costs the same."""
    names = []
    for _ in range(number):
        place = queue.first()
        assert place is not None
        queue.take(place, 1)
        queue.give_back(place, cost)
        names.append(place.item)
    return names


def filled(*lines: tuple[str, Party, int]) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for name, party, number in lines:
        for _ in range(number):
            queue.push(name, party)
    return queue


def test_those_of_one_session_are_served_in_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "12345":
        queue.push(name, A)
    assert served(queue, 5) == list("12345")
    assert queue.first() is None


def test_newcomer_is_next_however_many_wait_and_however_long_they_have_been_served() -> None:
    queue = filled(("flood", A, 100))
    assert served(queue, 50) == ["flood"] * 50
    queue.push("newcomer", B)
    assert served(queue, 2) == ["newcomer", "flood"]


def test_newcomer_does_not_catch_up_with_what_was_served_before_it_came() -> None:
    queue = filled(("old", A, 100))
    served(queue, 40)
    for _ in range(20):
        queue.push("new", B)
    assert served(queue, 20).count("new") in (10, 11)


def test_who_returns_does_not_catch_up_with_what_was_served_meanwhile() -> None:
    queue = filled(("old", A, 100), ("new", B, 1))
    served(queue, 41)
    for _ in range(20):
        queue.push("new", B)
    assert served(queue, 20).count("new") in (9, 10, 11)


def test_two_who_ask_one_by_one_do_not_starve_one_who_asks_for_many() -> None:
    queue = filled(("many", A, 30))
    order = []
    queue.push("b", B)
    queue.push("c", Party("c"))
    for _ in range(30):
        order += served(queue, 1)
        if order[-1] != "many":
            queue.push(order[-1], Party(order[-1]))
    assert [order.count(name) for name in ("many", "b", "c")] == [10, 10, 10]


def test_time_is_shared_not_turns() -> None:
    queue = filled(("long", A, 100), ("short", B, 100))
    spent = {"long": 0, "short": 0}
    for _ in range(60):
        place = queue.first()
        assert place is not None
        queue.take(place, 7)
        cost = 90 if place.item == "long" else 10
        queue.give_back(place, cost)
        spent[place.item] += cost
    assert abs(spent["long"] - spent["short"]) <= 90


def test_what_is_being_served_counts_before_it_has_ended() -> None:
    queue = filled(("a", A, 4), ("b", B, 4))
    order = []
    for _ in range(4):  # as many at a time
        place = queue.first()
        assert place is not None
        queue.take(place, 10)
        order.append(place.item)
    assert order == ["a", "b", "a", "b"]


def test_principals_share_alike_however_many_processes_and_sessions_they_have() -> None:
    queue: FairQueue[str] = FairQueue()
    for session in range(20):
        queue.push("sessions", Party("x", session=b"%d" % session))
        queue.push("processes", Party(f"p{session}", principal="uid:2"))
        queue.push("one", Party("y"))
    order = served(queue, 40)
    # uid:2 has half, and the two processes of uid:1 a quarter each.
    assert [order.count(name) for name in ("processes", "sessions", "one")] == [20, 10, 10]


def test_priorities_share_so_that_none_starves() -> None:
    lines = [("interactive", Party("i"), 400), ("batch", Party("b", priority=1), 400)]
    queue = filled(*lines, ("background", Party("g", priority=2), 400))
    order = served(queue, 210)
    assert [order.count(name) for name, *_ in lines] == [160, 40]
    assert order.count("background") == 10


def test_what_was_served_without_a_place_is_charged() -> None:
    queue = filled(("a", A, 2), ("b", B, 2))
    queue.charge(A, 15)
    assert served(queue, 4) == ["b", "b", "a", "a"]


def test_what_left_is_not_served_and_holds_up_nobody() -> None:
    queue = filled(("b", B, 1))
    place = queue.push("a", A)
    queue.remove(place)
    assert (len(queue), queue.waiting_of(A), queue.waiting_of(B)) == (1, (1, 0), (1, 1))
    assert served(queue, 1) == ["b"]
    assert queue.first() is None


def test_clients_that_come_and_go_are_forgotten() -> None:
    queue = filled(("stays", A, 3000))
    for number in range(2000):
        queue.push("goes", Party(f"p{number}"))
        served(queue, 2)
    processes = queue._root.below[0].below["uid:1"].below
    assert len(processes) <= 520
    assert "a" in processes
