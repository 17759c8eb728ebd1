"""Large messages of one process keep to a pace while another one calls: requests, messages of streams, and replies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_servers import WAIT_S, Peak, copies
from rpc_harness import Client, ServerProcess

from tilewright_server.endpoints.rpc.transport.pace import MOST_CHARGED_S
from tilewright_server.settings.rates import Rates

BEGIN = f"""
import sys, threading
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "server" / "rpc")]!r}
from hostile_servers import RUN, channel
from rpc_harness import Client, in_buffer, inline
from tilewright_proto.v1 import dispatch_pb2 as dp, memory_pb2 as mp, tensor_pb2 as tp
client = Client(sys.argv[1])
MIB = 1 << 20
"""
REQUESTS = """
data = dp.RunRequest(inputs=[tp.Operand(name="x", location=inline(bytes(18 * MIB)))]).SerializeToString()
run = channel(sys.argv[1]).unary_unary(RUN)
print("floods", flush=True)
while True:
    for call in [run.future(data) for _ in range(20)]:
        call.exception()
        print("one", flush=True)
"""
STREAMS = """
execution = client.execution(client.plan(MIB), inline(bytes(4 * MIB)), in_buffer(
    client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4 * MIB)).buffer))
request = dp.ExecuteRequest(session=client.token, executions=[execution.executions[0]] * 4)
def requests():
    while True:
        yield request
def flood():
    for reply in client.dispatch.ExecuteStream(requests()):
        assert not reply.results[0].HasField("error"), reply
        print("one", flush=True)
print("floods", flush=True)
threads = [threading.Thread(target=flood) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
UNREAD = """
buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4 * MIB)).buffer
request = mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=4 * MIB)
assert len(client.memory.ReadBuffer(request).data) == 4 * MIB
read = client.channel.unary_stream("/tilewright.v1.Memory/ReadBuffer")
calls = [read(request.SerializeToString()) for _ in range(400)]
print("floods", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("pace")) as found:
        yield found


@contextlib.contextmanager
def flood(server: ServerProcess, script: str) -> Iterator[subprocess.Popen[str]]:
    """A process that floods the server, after its first line."""
    command = [sys.executable, "-c", BEGIN + script, server.addresses[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "floods\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "script", [REQUESTS, pytest.param(STREAMS, marks=pytest.mark.extended)], ids=["requests", "streams"]
)
def test_long_messages_of_one_process_are_few_while_another_one_calls(server: ServerProcess, script: str) -> None:
    served: list[str] = []
    with Client(server.addresses[0]) as victim:
        copies(victim)
        began = time.monotonic()
        with flood(server, script) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=served.extend, args=(process.stdout,))
            reader.start()
            calls = 0
            while calls < 50 or (not served and time.monotonic() < began + WAIT_S):
                assert copies(victim) == bytes(range(16))
                calls += 1
                time.sleep(0.02)
            process.kill()
            reader.join()
        elapsed = time.monotonic() - began
    # Those that came before anything was known of the sender, and then its pace.
    rate, at_once = Rates().pace_rate, Rates().pace_at_once
    assert 0 < len(served) <= 4 + (at_once + elapsed * rate) / (MOST_CHARGED_S * rate) + 1


def test_replies_that_nobody_reads_are_not_made_while_another_process_calls(server: ServerProcess) -> None:
    with Client(server.addresses[0]) as victim:
        copies(victim)
        peak = Peak(server)
        with flood(server, UNREAD):
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                assert copies(victim) == bytes(range(16))
        assert peak.grown_mib() < 16 + 48  # of 112, the quota of a process, without a pace
