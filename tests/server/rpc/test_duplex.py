"""Both ways to take a stream's messages behave alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tilewright_server.rpc.duplex import OneStepDuplex, PortableDuplex, open_duplex

STREAM = "/test.Echo/Stream"


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message with itself; ``end`` ends the stream from the server's side."""

    def __init__(self, portable: bool) -> None:
        self.portable = portable
        self.kinds: list[type] = []
        self.ended = 0

    def service(self, details: Any) -> Any:
        def handle(requests: Iterator[bytes], context: Any, send: Callable[[bytes | None], None]) -> None:
            duplex = open_duplex(requests, send, portable=self.portable)
            self.kinds.append(type(duplex))
            reply = None
            while (data := duplex.exchange(reply, lambda: None)) is not None:
                if data == b"end":
                    break
                reply = data
            self.ended += 1
            if context.is_active():
                send(None)

        handle.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(handle)


@pytest.fixture(params=[True, False], ids=["portable", "one step"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Echo, Any]]:
    handler = Echo(request.param)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
        yield handler, channel.stream_stream(STREAM)
    server.stop(None).wait()


def test_the_fast_way_is_possible_with_this_grpc(echo: tuple[Echo, Any]) -> None:
    handler, stream = echo
    list(stream(iter([])))
    assert handler.kinds == [PortableDuplex if handler.portable else OneStepDuplex]


def test_messages_come_back_in_order(echo: tuple[Echo, Any]) -> None:
    _, stream = echo
    messages = [str(number).encode() * (number + 1) for number in range(200)]
    assert list(stream(iter(messages))) == messages


def test_empty_messages_are_messages(echo: tuple[Echo, Any]) -> None:
    _, stream = echo
    assert list(stream(iter([b"", b"x", b""]))) == [b"", b"x", b""]


def test_the_server_can_end_a_stream(echo: tuple[Echo, Any]) -> None:
    _, stream = echo
    assert list(stream(iter([b"a", b"end"]))) == [b"a"]


def test_a_client_that_cancels_ends_the_handler(echo: tuple[Echo, Any]) -> None:
    handler, stream = echo
    import threading
    import time

    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"a"
        hold.wait(5)

    call = stream(requests())
    assert next(call) == b"a"
    call.cancel()
    hold.set()
    deadline = time.monotonic() + 2
    while not handler.ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handler.ended == 1
