"""Floods below the level of calls: others are answered while they last."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from hostile_servers import WAIT_S, bystander_lives, channel, healthy
from rpc_harness import ServerProcess, eventually

BEGIN = """
import contextlib, socket, sys, time
PREFACE = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\x04" + bytes(5)
def connected():
    while True:
        way = socket.socket(socket.AF_UNIX)
        way.setblocking(False)
        try:
            way.connect(sys.argv[1])
            way.send(PREFACE)
            return way
        except OSError:
            way.close()
            time.sleep(0.001)
"""
CONNECTIONS = """
for number in range(10**9):
    connected().close()
    if number == 300:
        print("floods", flush=True)
"""
PINGS = """
ways = [connected() for _ in range(50)]
pings = (b"\\0\\0\\x08\\x06" + bytes(5) + b"12345678") * 500
for turn in range(10**9):
    for index, way in enumerate(ways):
        try:
            way.send(pings)
        except BlockingIOError:
            pass
        except OSError:
            way.close()
            ways[index] = connected()
    if turn == 5:
        print("floods", flush=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("flood", [CONNECTIONS, PINGS], ids=["connections", "pings"])
def test_others_are_answered_during_a_flood(tmp_path: Path, flood: str) -> None:
    with ServerProcess(tmp_path) as server, contextlib.ExitStack() as stack:
        address = server.addresses[0]
        command = [sys.executable, "-c", BEGIN + flood, address.removeprefix("unix:")]
        for _ in range(3):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "floods\n"
        for _ in range(5):
            # The kernel's queue of connections may be full for a moment: whoever comes again finds room.
            assert eventually(lambda: answers(address), WAIT_S)
        bystander_lives(address)


def answers(address: str) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return healthy(address)
    return False


MESSAGES = """
import sys, grpc
way = grpc.insecure_channel("unix:" + sys.argv[1], options=[("grpc.max_send_message_length", -1)])
run, ended = way.unary_unary("/tilewright.v1.Dispatch/Run"), 0
def send():
    run.future(bytes(6 << 20)).add_done_callback(again)
def again(call):
    global ended
    ended += 1
    send()
for _ in range(100):
    send()
for _ in sys.stdin:
    print(ended, flush=True)
"""


@pytest.mark.extended
def test_requests_of_others_are_received_in_turn(tmp_path: Path) -> None:
    """A hundred large requests of one process at a time: a small one of another came after all that were there."""
    with ServerProcess(tmp_path) as server, contextlib.ExitStack() as stack:
        address = server.addresses[0]
        command = [sys.executable, "-c", MESSAGES, address.removeprefix("unix:")]
        flood = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        stack.callback(flood.kill)

        def ended() -> int:
            assert flood.stdin is not None and flood.stdout is not None
            flood.stdin.write("\n")
            return int(flood.stdout.readline())

        assert eventually(lambda: ended() > 100, 3 * WAIT_S)
        passed = []
        with channel(address) as way:
            run = way.unary_unary("/tilewright.v1.Dispatch/Run")
            for _ in range(5):
                before = ended()
                with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                    run(b"", timeout=WAIT_S)
                passed.append(ended() - before)
        assert sorted(passed)[2] < 50, passed
        bystander_lives(address)
