"""The client's end of the local socket, against a peer that speaks the documented packets."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_peer import Fault, LocalPeer

import tilewright as tw
from tilewright.transport import frames as packets
from tilewright.transport.launch_connections import Lane, Lanes, NoLaneError
from tilewright.transport.local import Connection, open_control

TOKEN = b"token of a session"


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[LocalPeer]:
    made = LocalPeer(tmp_path / "s.local")
    yield made
    made.close()


def control(peer: LocalPeer, timeout: float | None = 5.0):
    found = open_control([peer.path], TOKEN, timeout)
    assert found is not None
    return found


def test_a_connection_introduces_itself(peer: LocalPeer) -> None:
    made = control(peer)
    assert peer.tokens == [TOKEN]
    made.close()


def test_calls_carry_messages_and_descriptors_both_ways(peer: LocalPeer) -> None:
    def shout(payload: bytes, fds: list[int]) -> tuple[int, bytes, int]:
        text = b"".join(os.pread(fd, 100, 0) for fd in fds)
        answer = os.memfd_create("answer")
        os.write(answer, b"from the server")
        return 7, payload.upper() + text, answer

    peer.calls[packets.REGISTER_REGION] = shout
    made = control(peer)
    fd = os.memfd_create("request")
    os.write(fd, b" from the client")
    reply = made.call(packets.REGISTER_REGION, b"hello", (fd,))
    assert (reply.value, reply.payload, len(reply.fds)) == (7, b"HELLO from the client", 1)
    assert os.pread(reply.fds[0], 100, 0) == b"from the server"
    assert not os.get_inheritable(reply.fds[0])
    for item in (fd, *reply.fds):
        os.close(item)
    made.close()


def test_errors_of_calls_are_typed(peer: LocalPeer) -> None:
    def fail(payload: bytes, fds: list[int]) -> tuple[int, bytes, int]:
        raise Fault("resource_exhausted", "some_rule")

    peer.calls[packets.BIND] = fail
    made = control(peer)
    with pytest.raises(tw.ResourceExhaustedError) as caught:
        made.call(packets.BIND, b"")
    assert caught.value.rule == "some_rule"
    made.close()


def test_where_nobody_listens_or_the_client_is_refused_there_is_no_local_socket(
    peer: LocalPeer, tmp_path: Path
) -> None:
    assert open_control([str(tmp_path / "none"), ""], TOKEN, 1.0) is None
    assert open_control([str(tmp_path / ("x" * 200))], TOKEN, 1.0) is None
    peer.refuse = Fault("permission_denied", "peer_uid")
    assert open_control([peer.path], TOKEN, 1.0) is None
    peer.refuse = None
    second = open_control([str(tmp_path / "none"), peer.path], TOKEN, 1.0)
    assert second is not None
    second.close()


def test_a_server_that_goes_away_is_a_typed_error(peer: LocalPeer) -> None:
    made = control(peer)
    peer.hang_up()
    for _ in range(2):
        with pytest.raises(tw.UnavailableError, match="reconnect") as caught:
            made.call(packets.BIND, b"")
        assert caught.value.rule == "local_socket"
    assert made.broken


def answered(peer: LocalPeer, launches: int) -> None:
    """Let the peer go on, and wait until it has answered so many launches in all."""
    peer.go.set()
    deadline = time.monotonic() + 20
    while len(peer.launches) < launches:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_late_answer_is_a_typed_error_and_belongs_to_nobody(peer: LocalPeer) -> None:
    lane = Lane(peer.path, TOKEN, 0.5)
    peer.go.clear()
    with pytest.raises(tw.DeadlineError):
        lane.run(1)
    answered(peer, 1)
    assert lane.run(2) == 1234
    assert lane.connection._stash == {}
    assert [launch[0] for launch in peer.launches] == [1, 2]
    lane.close()


def test_launches_that_complete_say_how_long_they_took(peer: LocalPeer) -> None:
    lane = Lane(peer.path, TOKEN, 5.0)
    assert lane.run(42) == 1234
    assert peer.launches == [(42, packets.TIME, 0, 1)]
    peer.failing.add(43)
    with pytest.raises(tw.NotFoundError, match="asked to fail"):
        lane.run(43)
    assert lane.run(42) == 1234
    lane.close()


@pytest.mark.parametrize("spin_ns", [0, 30_000_000])
def test_a_launch_is_asked_for_with_and_without_sleeping(peer: LocalPeer, spin_ns: int) -> None:
    lane = Lane(peer.path, TOKEN, 0.5)
    lane.connection.spin_ns = spin_ns
    assert [lane.run(9) for _ in range(5)] == [1234] * 5
    peer.failing.add(8)
    with pytest.raises(tw.NotFoundError) as caught:
        lane.run(8)
    assert caught.value.rule == "binding_id"
    peer.go.clear()
    threading.Timer(0.1, peer.go.set).start()  # longer than anybody looks
    assert lane.run(9) == 1234
    peer.go.clear()
    with pytest.raises(tw.DeadlineError):
        lane.run(9)
    answered(peer, 8)
    assert lane.run(9) == 1234  # not the one that came too late
    assert not lane.connection._unwanted
    peer.hang_up()
    for _ in range(2):
        with pytest.raises(tw.UnavailableError) as gone:
            lane.run(9)
        assert gone.value.rule == "local_socket"


def test_replies_to_others_may_come_before_that_of_a_launch(peer: LocalPeer) -> None:
    lane = Lane(peer.path, TOKEN, 5.0)
    connection, first = lane.connection, lane.connection.next_sequence()
    connection.send(packets.HEADER.pack(packets.LAUNCH, packets.REPLY, 0, first, 5))
    assert lane.run(6) == 1234
    assert connection.wait(first).value == 1234


def test_sequences_wrap_around(peer: LocalPeer) -> None:
    lane = Lane(peer.path, TOKEN, 5.0)
    lane.connection.sequence = 0xFFFFFFFE
    assert [lane.run(1) for _ in range(4)] == [1234] * 4
    assert lane.connection.sequence == 2
    lane.close()


def test_replies_to_others_are_kept_for_them(peer: LocalPeer) -> None:
    connection = Connection(peer.path, TOKEN, 5.0)
    first, second = connection.next_sequence(), connection.next_sequence()
    frames = [packets.HEADER.pack(packets.LAUNCH, packets.REPLY, 0, number, 1) for number in (first, second)]
    connection.send(b"".join(frames))
    assert connection.wait(second).value == 1234
    assert connection.wait(first).value == 1234
    connection.close()


def test_a_server_whose_answers_are_not_read_is_not_waited_for_without_end(peer: LocalPeer) -> None:
    """Both directions are full: the client takes answers while it cannot send."""
    peer.failing.add(9)
    connection = Connection(peer.path, TOKEN, 20.0)
    count = 4000
    first = connection.sequence + 1
    for _ in range(count):
        connection.send(packets.HEADER.pack(packets.LAUNCH, 0, 0, connection.next_sequence(), 9))
    last = connection.next_sequence()
    connection.send(packets.HEADER.pack(packets.LAUNCH, packets.REPLY, 0, last, 1))
    assert connection.wait(last).value == 1234
    failed = connection.take(first, count)
    assert len(failed) == count
    assert all(isinstance(error, tw.NotFoundError) for error in failed.values())
    connection.close()


def test_every_thread_has_a_connection_that_ends_with_it(peer: LocalPeer) -> None:
    lanes = Lanes(peer.path, TOKEN, 5.0)
    assert lanes.of_thread() is lanes.of_thread()
    numbers: set[int] = set()

    def work() -> None:
        lanes.of_thread().run(1)
        numbers.add(id(lanes.of_thread()))

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 30
    while peer.ended < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert peer.ended == 5
    lanes.close()
    with pytest.raises(tw.UnavailableError):
        lanes.of_thread("other")


def test_more_threads_than_connections_share(peer: LocalPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.transport.launch_connections.MAX_LANES", 2)
    lanes = Lanes(peer.path, TOKEN, 5.0)
    gate = threading.Barrier(6)
    results: list[int] = []

    def work() -> None:
        lane = lanes.of_thread()
        gate.wait(10)
        results.extend(lane.run(1) for _ in range(50))
        gate.wait(10)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1234] * 300
    assert len(peer._connections) == 2
    lanes.close()


def test_threads_share_when_the_server_has_no_room(peer: LocalPeer) -> None:
    lanes = Lanes(peer.path, TOKEN, 5.0)
    peer.room = 1
    mine = lanes.of_thread()
    found: list[Lane] = []
    thread = threading.Thread(target=lambda: found.append(lanes.of_thread()))
    thread.start()
    thread.join()
    assert found == [mine]
    with pytest.raises(NoLaneError, match="no further local connection"):
        lanes.of_thread("another device")
    lanes.close()


def test_a_refused_lane_says_that_grpc_may_do(peer: LocalPeer) -> None:
    lanes = Lanes(peer.path, TOKEN, 5.0)
    peer.refuse = Fault("resource_exhausted", "session_connections")
    with pytest.raises(NoLaneError):
        lanes.of_thread()
    lanes.close()
