"""Clients of the release before work with this server: the released Python client, and clients made from the released
protocol."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "server" / "rpc")]

from rpc_harness import REAL, ServerProcess  # noqa: E402

RELEASED = ROOT / "proto" / "released.binpb"
FOLDERS = ("client", "proto", "native/tilewright_native")
PROGRAM = """
import json, sys
import numpy as np
import tilewright as tw
a = np.arange(32 * 48, dtype=np.float32).reshape(32, 48) % 7
b = np.arange(48 * 24, dtype=np.float32).reshape(48, 24) % 5
done = []
with tw.connect(sys.argv[1], launch="server") as client:
    done.append(bool((client.gemm(a, b) == a @ b).all()))
    shared = [client.asarray(item) for item in (a, b)]
    done.append(bool((client.gemm(*shared) == a @ b).all()))
    done.append(client.report.bytes_copied == 0)
    with client.plan_gemm(*shared) as plan:
        for _ in range(3):
            done.append(bool((plan(*shared) == a @ b).all()))
    try:
        client.gemm(a, a)
    except tw.TilewrightError as error:
        done.append(bool(error.field and error.fix))
    done.append(client.kernels.statistics() is not None)
print(json.dumps([tw.__file__, done]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("skew"), REAL) as process:
        yield process


def released_commit() -> str:
    """The commit that recorded the released protocol. Skips the test where git does not know it."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%H", "--", str(RELEASED)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = ""
    if not found:
        pytest.skip("needs git and the history of the repository, for the client as it was released")
    return found


@pytest.fixture
def old_client(tmp_path: Path) -> Path:
    """Source roots of the client at the release."""
    command = ["git", "-C", str(ROOT), "archive", released_commit(), *FOLDERS]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"git cannot give out the release: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:  # the filter of extractall is not in every Python 3.10 and 3.11
            if member.isfile():
                target = tmp_path / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())
    return tmp_path


@pytest.mark.extended
def test_the_released_client_works_with_this_server(server: ServerProcess, old_client: Path) -> None:
    roots = [str((old_client / folder).parent if "/" in folder else old_client / folder) for folder in FOLDERS]
    program = f"import sys; sys.path[:0] = {roots!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, server.addresses[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    place, results = json.loads(done.stdout.splitlines()[-1])
    assert Path(place).is_relative_to(old_client)
    assert results == [True] * len(results) and len(results) == 8


class Strangers:
    """Messages and calls of the released protocol, made from its descriptors alone."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._pool = descriptor_pool.DescriptorPool()
        files = list(descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()).file)
        known: set[str] = set()
        while files:  # a file comes after those that it depends on
            file = next(item for item in files if known.issuperset(item.dependency))
            self._pool.Add(file)
            known.add(file.name)
            files.remove(file)

    def make(self, name: str, **fields: Any) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"tilewright.v1.{name}"))(**fields)

    def call(self, service: str, method: str, request: Any) -> Any:
        found = self._pool.FindServiceByName(f"tilewright.v1.{service}").FindMethodByName(method)
        reply = message_factory.GetMessageClass(found.output_type)
        path = f"/tilewright.v1.{service}/{method}"
        kind = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        return kind(path, type(request).SerializeToString, reply.FromString)(request, timeout=60)


def test_clients_made_from_the_released_protocol_work_with_this_server(server: ServerProcess) -> None:
    a = np.arange(64, dtype=np.float32).reshape(8, 8)
    with grpc.insecure_channel(server.addresses[0]) as channel:
        old = Strangers(channel)
        events = old.call("Memory", "OpenSession", old.make("OpenSessionRequest", client_name="old"))
        session = next(events).opened.session
        assert len(session) == 16
        buffer = old.call("Memory", "CreateBuffer", old.make("CreateBufferRequest", session=session, bytes=256)).buffer
        write = old.make("WriteBufferRequest", session=session, buffer=buffer, data=a.tobytes(), bytes=256)
        old.call("Memory", "WriteBuffer", write)
        read = old.make("ReadBufferRequest", session=session, buffer=buffer, bytes=256)
        assert old.call("Memory", "ReadBuffer", read).data == a.tobytes()
        assert [
            item.buffer for item in old.call("Memory", "Status", old.make("StatusRequest", session=session)).buffers
        ]
        assert {item.name for item in old.call("Kernels", "Statistics", old.make("StatisticsRequest")).plugins}
        events.cancel()
