"""Clients that are stopped (SIGSTOP) at any moment: others go on, and what they hold ends with them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hostile_servers import WAIT_S, bystander_lives, stopped
from rpc_harness import ServerProcess, eventually

HERE = Path(__file__).parent
BEGIN = f"""
import sys, threading, time
sys.path[:0] = {[str(HERE), str(HERE.parent / "server" / "rpc"), str(HERE.parent / "server" / "local")]!r}
from hostile_servers import *
from rpc_harness import *
from tilewright_proto.v1 import dispatch_pb2 as dp, memory_pb2 as mp
client = Client(sys.argv[1])
def there():
    print("there", flush=True)
    time.sleep(600)
"""
REGION = """
file = MemoryFile(1 << 20)
region = client.register(file).region
plan = client.plan(16)
client.dispatch.Execute(client.execution(plan, in_region(region), in_region(region, 64)))
there()
"""
STREAM = """
plan = client.plan(16)
def requests():
    for number in range(100):
        if number == 3:
            there()
        yield client.execution(plan, inline(bytes(64)), inline(bytes(64)))
for _ in client.dispatch.ExecuteStream(requests()):
    pass
"""
UNREAD = """
buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4 << 20)).buffer
request = mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=4 << 20)
calls = [client.memory.ReadBuffer.future(request) for _ in range(100)]
there()
"""
LOCAL = """
from local_harness import CALL, HEADER, HELLO, REGISTER, Wire
wire = Wire(client.opened.local_socket)
wire.sequence += 1
wire.send(HEADER.pack(HELLO, 0, 0, 1, 1) + client.token)
there()
"""
STAGES = {"with a region": REGION, "within a stream": STREAM, "reading no replies": UNREAD, "in a packet": LOCAL}


@pytest.mark.extended
@pytest.mark.parametrize("work", STAGES.values(), ids=STAGES)
def test_clients_that_are_stopped_hold_up_nobody_and_leave_nothing(tmp_path: Path, work: str) -> None:
    with ServerProcess(tmp_path) as server:
        address = server.addresses[0]
        bystander_lives(address)
        assert eventually(lambda: server.regions() == (0, 0))
        before = len(server.descriptors())
        with contextlib.ExitStack() as clients:
            for _ in range(3):
                clients.enter_context(stopped(server, BEGIN + work))
            for _ in range(3):
                bystander_lives(address)
        assert eventually(lambda: server.regions() == (0, 0), WAIT_S)
        assert eventually(lambda: len(server.descriptors()) <= before + 1, WAIT_S), server.descriptors()
        bystander_lives(address)
        assert "Traceback" not in server.log()


def test_a_server_ends_while_a_client_is_stopped(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, stopped(server, BEGIN + REGION):
        assert server.stop() == 0
