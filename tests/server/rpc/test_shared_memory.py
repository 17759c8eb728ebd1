"""Shared memory from another process: what may be registered, used and given back, and by whom."""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from rpc_harness import (
    F_ADD_SEALS,
    SEAL,
    SHRINK,
    Client,
    MemoryFile,
    ServerProcess,
    eventually,
    in_region,
    inline,
    refused,
)

from tilewright_proto.v1 import error_pb2
from tilewright_proto.v1 import memory_pb2 as mp

TEXT = bytes(range(64))


def test_an_operand_in_a_region_is_read_and_written_in_place(client: Client, file: MemoryFile) -> None:
    region = client.register(file)
    assert region.zero_copy
    file.bytes[:64] = TEXT
    reply = client.copy(in_region(region.region), in_region(region.region, 4096))
    assert file.bytes[4096:4160] == TEXT
    assert not reply.outputs
    assert reply.report.bytes_copied == 0


def test_a_sealed_region_keeps_no_descriptor(client: Client, server: ServerProcess, file: MemoryFile) -> None:
    maps, files = server.regions()
    client.register(file)
    assert server.regions() == (maps + 1, files)


def test_inline_and_region_operands_mix(client: Client, file: MemoryFile) -> None:
    region = client.register(file).region
    client.copy(inline(TEXT), in_region(region, 64))
    assert file.bytes[64:128] == TEXT
    assert client.copy(in_region(region, 64)).outputs[0].inline == TEXT


def test_register_before_use_and_not_after(client: Client, file: MemoryFile) -> None:
    with refused("not_found", "region_id"):
        client.unregister(12345)
    region = client.register(file).region
    client.unregister(region)
    with refused("not_found", "region_id"):
        client.unregister(region)
    with refused("not_found", "region_id"):
        client.copy(in_region(region))


def test_registering_again_gives_another_region(client: Client, file: MemoryFile) -> None:
    first = client.register(file).region
    second = client.register(file).region
    assert first != second
    client.unregister(first)
    client.copy(in_region(second), in_region(second, 64))
    client.unregister(second)
    third = client.register(file).region
    assert third not in (first, second)
    assert [item.region for item in client.status().regions] == [third]


def test_a_stale_region_id_never_names_the_new_region(client: Client, file: MemoryFile) -> None:
    old = client.register(file).region
    plan = client.plan()
    request = client.execution(plan, in_region(old), in_region(old, 64))
    assert not client.dispatch.Execute(request).results[0].HasField("error")
    client.unregister(old)
    client.register(file)
    error = client.dispatch.Execute(request).results[0].error
    assert (error.code, error.rule) == ("not_found", "region_id")


@pytest.mark.parametrize(
    ("offset", "rule"),
    [
        (1 << 16, "location_bounds"),
        ((1 << 16) - 60, "location_bounds"),
        (2**64 - 4, "location_bounds"),
        (2**63, "location_bounds"),
        (2, "offset_alignment"),
    ],
)
def test_offsets_stay_inside_and_aligned(client: Client, file: MemoryFile, offset: int, rule: str) -> None:
    region = client.register(file).region
    with refused("invalid_argument", rule):
        client.copy(in_region(region, offset), in_region(region))


def test_a_tensor_larger_than_its_region_is_refused(client: Client, file: MemoryFile) -> None:
    region = client.register(file, nbytes=64).region
    client.copy(in_region(region), count=16)
    with refused("invalid_argument", "location_bounds"):
        client.copy(in_region(region), count=17)


@pytest.mark.parametrize("nbytes", [0, (1 << 16) + 1, 2**46, 2**46 + 1, 2**63, 2**64 - 1])
def test_a_region_has_the_size_of_its_file_at_most(client: Client, file: MemoryFile, nbytes: int) -> None:
    with refused("invalid_argument", "region_size"):
        client.register(file, nbytes=nbytes)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tilewright-",
        "tilewright-" + "0" * 31,
        "tilewright-" + "0" * 65,
        "tilewright-" + "G" * 32,
        "other-" + "0" * 32,
        "tilewright-" + "0" * 32 + "\n",
        "../tilewright-" + "0" * 32,
        "/tilewright-" + "0" * 32,
        "triton_python_backend_shm_region_1",
    ],
)
def test_only_names_of_128_random_bits_are_taken(client: Client, file: MemoryFile, name: str) -> None:
    with refused("invalid_argument", "region_name"):
        client.register(file, name=name)


def told(detail: error_pb2.ErrorDetail) -> bytes:
    """All that an error says but for the id of its request."""
    detail.ClearField("request")
    return detail.SerializeToString()


def test_nothing_can_be_learned_of_other_processes(client: Client, server: ServerProcess, file: MemoryFile) -> None:
    other = "tilewright-" + secrets.token_hex(16)
    texts = set()
    sources = [
        file.source(name=other),  # exists, but the name is not known
        file.source(fd=0),
        file.source(fd=99999),
        file.source(fd=-1),
        file.source(pid=1),
        file.source(pid=0),
        file.source(pid=-1),
        file.source(pid=2**31 - 1),
        file.source(pid=server.pid),
    ]
    for source in sources:
        with refused("not_found", "region_source") as found:
            client.memory.RegisterRegion(mp.RegisterRegionRequest(session=client.token, memfd=source, bytes=64))
        texts.add(told(found[0]))
    with refused("not_found", "region_source") as found:
        client.memory.RegisterRegion(
            mp.RegisterRegionRequest(session=client.token, posix=mp.PosixSource(name="/" + other), bytes=64)
        )
    texts.add(told(found[0]))
    assert len(texts) == 1


def test_a_file_that_only_looks_like_a_memory_file_is_refused(client: Client, tmp_path: Path, file: MemoryFile) -> None:
    # A pipe, a plain file and a directory under the descriptor number that the client names.
    reader, writer = os.pipe()
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    for fd in (reader, writer, plain):
        with refused("not_found", "region_source"):
            client.register(file, fd=fd)
        os.close(fd)


def test_a_memory_file_belongs_to_the_first_session(
    client: Client, connect: Callable[[], Client], file: MemoryFile
) -> None:
    region = client.register(file).region
    thief = connect()
    with refused("not_found", "region_source"):
        thief.register(file)
    with refused("not_found", "region_id") as of_other:
        thief.unregister(region)
    with refused("not_found", "region_id") as of_none:
        thief.unregister(region ^ 1)
    assert of_other[0].message == of_none[0].message
    assert of_other[0].fix == of_none[0].fix
    with refused("not_found", "region_id"):
        thief.copy(in_region(region))
    assert not thief.status().regions
    client.unregister(region)
    thief.register(file)  # free again


def test_an_unknown_session_and_an_ended_one_look_the_same(client: Client, connect: Callable[[], Client]) -> None:
    ended = connect()
    token = ended.token
    ended.close()
    texts = set()
    assert eventually(lambda: _status_fails(client, token))
    for value in (token, secrets.token_bytes(16), b"", b"x", bytes(1000)):
        with refused("not_found", "session_token") as found:
            client.memory.Status(mp.StatusRequest(session=value))
        texts.add(told(found[0]))
    assert len(texts) == 1


def _status_fails(client: Client, token: bytes) -> bool:
    try:
        client.memory.Status(mp.StatusRequest(session=token))
    except Exception:
        return True
    return False


def test_unregister_waits_for_work_in_flight(client: Client, server: ServerProcess, file: MemoryFile) -> None:
    region = client.register(file).region
    mapped = server.regions()[0]
    file.bytes[:64] = TEXT
    runner = threading.Thread(
        target=client.copy, args=(in_region(region), in_region(region, 64)), kwargs={"seconds": 1.0}
    )
    runner.start()
    assert eventually(lambda: client.status().regions[0].in_use == 1)
    with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
        client.unregister(region, timeout=0.1)
    assert runner.is_alive(), "the work outlasts the caller's patience"
    assert server.regions()[0] == mapped, "still in use, so still there"
    with refused("not_found", "region_id"):
        client.copy(in_region(region))  # but nobody can use it any more
    runner.join()
    assert file.bytes[64:128] == TEXT
    assert eventually(lambda: server.regions()[0] == mapped - 1)


def test_unregister_returns_when_work_in_flight_is_done(client: Client, file: MemoryFile) -> None:
    region = client.register(file).region
    file.bytes[:64] = TEXT
    runner = threading.Thread(
        target=client.copy, args=(in_region(region), in_region(region, 64)), kwargs={"seconds": 0.3}
    )
    runner.start()
    assert eventually(lambda: client.status().regions[0].in_use == 1)
    assert file.bytes[64:128] != TEXT
    client.unregister(region)
    assert file.bytes[64:128] == TEXT, "it returns when the work is done"
    runner.join()


# Memory that its owner can shrink


def test_an_unsealed_file_is_copied_through(client: Client) -> None:
    file = MemoryFile(8192, sealed=False)
    region = client.register(file)
    assert not region.zero_copy
    file.bytes[:64] = TEXT
    reply = client.copy(in_region(region.region), in_region(region.region, 4096))
    assert file.bytes[4096:4160] == TEXT
    assert reply.report.bytes_copied == 128
    file.close()


def test_shrinking_a_file_after_registration_gives_an_error_and_no_crash(client: Client, server: ServerProcess) -> None:
    file = MemoryFile(8192, sealed=False)
    region = client.register(file).region
    os.ftruncate(file.fd, 0)
    with refused("invalid_argument", "region_shrunk"):
        client.copy(in_region(region))
    with refused("invalid_argument", "region_shrunk"):
        client.copy(inline(TEXT), in_region(region))
    assert os.fstat(file.fd).st_size == 0, "the server must not grow it again"
    assert server.alive
    os.close(file.fd)


def test_shrinking_a_file_during_runs_never_kills_the_server(client: Client, server: ServerProcess) -> None:
    file = MemoryFile(1 << 20, sealed=False)
    region = client.register(file).region
    plan = client.plan(count=1 << 17)
    request = client.execution(plan, in_region(region), in_region(region, 1 << 19))
    stop = time.monotonic() + 1.0

    def shrink() -> None:
        while time.monotonic() < stop:
            os.ftruncate(file.fd, 4096)
            os.ftruncate(file.fd, 1 << 20)

    shrinker = threading.Thread(target=shrink)
    shrinker.start()
    seen = set()
    while time.monotonic() < stop:
        result = client.dispatch.Execute(request).results[0]
        seen.add(result.error.rule)
    shrinker.join()
    assert seen <= {"", "region_shrunk", "region_populated"}  # what grew again has no pages
    assert server.alive
    os.close(file.fd)


def test_a_sealed_file_cannot_shrink(file: MemoryFile) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 0)


def test_a_file_sealed_against_writing_is_refused(client: Client) -> None:
    for seals in (SEAL | SHRINK | 0x8, 0x8, 0x10):
        fd = os.memfd_create(name := "tilewright-" + secrets.token_hex(16), os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
        with refused("permission_denied", "region_writable"):
            source = mp.MemfdSource(pid=os.getpid(), fd=fd, name=name)
            client.memory.RegisterRegion(mp.RegisterRegionRequest(session=client.token, memfd=source, bytes=4096))
        os.close(fd)


# POSIX shared memory


def test_posix_shared_memory_is_copied_through(client: Client) -> None:
    name = "tilewright-" + secrets.token_hex(16)
    path = Path("/dev/shm") / name
    path.write_bytes(TEXT + bytes(8128))
    try:
        request = mp.RegisterRegionRequest(session=client.token, posix=mp.PosixSource(name="/" + name), bytes=8192)
        region = client.memory.RegisterRegion(request)
        assert not region.zero_copy
        client.copy(in_region(region.region), in_region(region.region, 64))
        assert path.read_bytes()[64:128] == TEXT
        client.unregister(region.region)
        assert path.exists(), "the server unlinks only what it is asked to"
    finally:
        path.unlink()


def test_a_link_among_posix_shared_memory_is_not_followed(client: Client, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(bytes(4096))
    name = "tilewright-" + secrets.token_hex(16)
    link = Path("/dev/shm") / name
    link.symlink_to(target)
    try:
        with refused("not_found", "region_source"):
            client.memory.RegisterRegion(
                mp.RegisterRegionRequest(session=client.token, posix=mp.PosixSource(name=name), bytes=4096)
            )
    finally:
        link.unlink()


# Nothing is lost


def test_refused_registrations_leak_nothing(client: Client, server: ServerProcess, file: MemoryFile) -> None:
    small = MemoryFile(4096)
    before = server.regions(), len(server.descriptors())
    for _ in range(50):
        with refused("invalid_argument", "region_size"):
            client.register(small, nbytes=8192)
        with refused("not_found"):
            client.register(file, fd=small.fd)
    assert (server.regions(), len(server.descriptors())) == before
    small.close()


def test_a_cancelled_lease_frees_everything(connect: Callable[[], Client], server: ServerProcess) -> None:
    before = server.regions()
    leaving = connect()
    files = [MemoryFile(4096, sealed=sealed) for sealed in (True, False) * 5]
    for file in files:
        leaving.register(file)
    assert server.regions() == (before[0] + 5, before[1] + 5)
    leaving.close()
    assert eventually(lambda: server.regions() == before)
    for file in files:
        file.close()


KILLED = """
    import sys, time
    sys.path.insert(0, {folder!r})
    from rpc_harness import Client, MemoryFile, in_region
    client = Client({address!r})
    files = [MemoryFile(65536, sealed=sealed) for sealed in (True, False) * 10]
    regions = [client.register(file).region for file in files]
    plan = client.plan(seconds={seconds})
    print("ready", flush=True)
    client.dispatch.Execute(client.execution(plan, in_region(regions[0]), in_region(regions[2])))
    time.sleep(60)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_killed_client_leaves_nothing_behind(server: ServerProcess, seconds: float) -> None:
    before = server.regions(), len(server.descriptors())
    code = textwrap.dedent(KILLED).format(
        folder=str(Path(__file__).parent), address=server.addresses[0], seconds=seconds
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"ready\n"
        assert server.regions()[0] == before[0][0] + 10
        time.sleep(0.05)
        victim.kill()
    assert eventually(lambda: server.regions() == before[0])
    assert eventually(lambda: len(server.descriptors()) <= before[1])
