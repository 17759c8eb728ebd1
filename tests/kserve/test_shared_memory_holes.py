"""Holes that servers of this protocol have had in client shared memory, each closed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from forwarding import STRANGER, folder_for_all, forwarded
from rpc_harness import ServerProcess, detail_of

from tilewright_proto.inference import inference_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
GEMM = [sys.executable, str(Path(__file__).parents[1] / "server" / "app" / "operation_server.py"), "gemm"]
A = np.ones((4, 4), np.float32)
WAIT_S = 30.0


class Client:
    """Calls by name over a connection of its own."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])

    def call(self, name: str, request: Any, kind: Any) -> Any:
        way = self.channel.unary_unary(SERVICE + name, type(request).SerializeToString, kind.FromString)
        return way(request, timeout=60)

    def register(self, name: str, key: str, nbytes: int = 64, offset: int = 0) -> None:
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=nbytes)
        self.call("SystemSharedMemoryRegister", request, pb.SystemSharedMemoryRegisterResponse)

    def unregister(self, name: str = "") -> None:
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        self.call("SystemSharedMemoryUnregister", request, pb.SystemSharedMemoryUnregisterResponse)

    def names(self) -> list[str]:
        request = pb.SystemSharedMemoryStatusRequest()
        return sorted(self.call("SystemSharedMemoryStatus", request, pb.SystemSharedMemoryStatusResponse).regions)

    def cuda(self, handle: bytes, device: int = 0, nbytes: int = 64) -> None:
        request = pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=handle, device_id=device, byte_size=nbytes)
        self.call("CudaSharedMemoryRegister", request, pb.CudaSharedMemoryRegisterResponse)

    def infer(self, **shared: Any) -> Any:
        """A product whose first operand lies in shared memory as the parameters say."""
        request = pb.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[A.tobytes()])
        for name in ("a", "b"):
            request.inputs.add(name=name, datatype="FP32", shape=[4, 4])
        for key, value in shared.items():
            field = "string_param" if isinstance(value, str) else "int64_param"
            setattr(request.inputs[0].parameters[f"shared_memory_{key}"], field, value)
        return self.call("ModelInfer", request, pb.ModelInferResponse)


@contextlib.contextmanager
def refused(*codes: grpc.StatusCode) -> Iterator[list[str]]:
    """Expect one of the codes; the list gets the text."""
    said: list[str] = []
    with pytest.raises(grpc.RpcError) as caught:
        yield said
    assert caught.value.code() in codes, caught.value
    said.append(caught.value.details())


@pytest.fixture
def client(tcp: str) -> Iterator[Client]:
    made = Client(tcp)
    yield made
    made.channel.close()


@pytest.fixture
def key() -> Iterator[str]:
    path = Path(f"/dev/shm/kserve_hole_{os.getpid()}_{time.monotonic_ns()}")
    path.write_bytes(A.tobytes())
    yield f"/{path.name}"
    path.unlink(missing_ok=True)


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.extended
def test_names_of_others_are_unknown_in_the_same_words(client: Client, tcp: str, key: str) -> None:
    client.register("mine", key)
    other = Client(tcp)
    assert other.names() == []
    other.unregister()
    with refused(NOT_FOUND) as there:
        other.infer(region="mine", byte_size=64)
    with refused(NOT_FOUND) as nowhere:
        other.infer(region="none", byte_size=64)
    assert there[0].replace("mine", "none") == nowhere[0]
    with refused(NOT_FOUND):  # nor the object behind it
        other.register("theirs", key)
    assert client.names() == ["mine"]
    other.channel.close()


@pytest.mark.parametrize(
    ("offset", "size"), [(1, 64), (64, 64), (2**62, 64), (2**63 - 1, 2**63 - 1), (0, 2**63 - 1), (-4, 64), (0, -1)]
)
def test_no_sum_of_offset_and_size_overflows_or_reaches_out(client: Client, key: str, offset: int, size: int) -> None:
    client.register("r", key)
    with refused(INVALID):
        client.infer(region="r", byte_size=size, offset=offset)


@pytest.mark.parametrize("change", [{}, {"byte_size": 60}, {"byte_size": "64"}, {"byte_size": 64, "offset": "0"}])
def test_sizes_that_are_missing_or_of_another_type_are_refused(
    client: Client, key: str, change: dict[str, Any]
) -> None:
    client.register("r", key)
    with refused(INVALID):
        client.infer(region="r", **change)
    with refused(INVALID):
        client.infer(region=7, byte_size=64)


@pytest.mark.parametrize(
    ("nbytes", "offset"), [(0, 0), (65, 0), (64, 1), (2**64 - 1, 1), (1, 2**64 - 1), (2**63, 2**63)]
)
def test_no_more_is_registered_than_there_is(client: Client, key: str, nbytes: int, offset: int) -> None:
    with refused(INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED):
        client.register("r", key, nbytes, offset)
    assert client.names() == []


def test_bytes_that_are_registered_are_a_quota_of_process_and_principal(client: Client, tcp: str, key: str) -> None:
    """Objects are sparse where nobody has written: what may be registered is what the server may have to fill."""
    os.truncate(f"/dev/shm{key}", 1 << 40)
    with pytest.raises(grpc.RpcError) as caught:
        client.register("all", key, 1 << 40)
    told = detail_of(caught.value)
    assert (told.code, told.rule, told.field) == ("resource_exhausted", "quota", "kserve_region_bytes")
    assert not told.retry_after_ms and "all clients together hold" in told.message
    share = int(told.value) - int(told.value) // 8
    half = share // 2 - (1 << 20)  # of other tests something may be registered for a moment
    client.register("half", key, half)
    with pytest.raises(grpc.RpcError) as caught:
        client.register("more", key, share // 4)
    told = detail_of(caught.value)
    assert told.field == "kserve_region_bytes" and f"this client's process holds {half}" in told.message
    assert told.retry_after_ms > 0
    other = Client(tcp)
    own = Path(f"/dev/shm{key}_other")
    try:
        with own.open("wb") as file:
            file.truncate(share)
        other.register("quarter", own.name, share // 4)
        client.unregister()
        client.register("again", key, share // 4)
        assert own.stat().st_blocks == 0
    finally:
        own.unlink()
        other.channel.close()


@pytest.mark.parametrize("bad", ["", "/", ".", "..", "/../etc/passwd", "//etc/passwd", "/a/b", "a\0b", "x" * 300])
def test_keys_are_names_of_objects_and_no_paths(client: Client, bad: str) -> None:
    with refused(INVALID):
        client.register("r", bad)


def test_links_other_files_and_memory_of_other_users_are_not_there(client: Client, tmp_path: Path) -> None:
    shm = Path(f"/dev/shm/kserve_odd_{os.getpid()}")
    target = tmp_path / "file"
    target.write_bytes(bytes(64))
    try:
        shm.symlink_to(target)
        with refused(NOT_FOUND):
            client.register("r", shm.name)
        shm.unlink()
        os.mkfifo(shm)
        with refused(NOT_FOUND):
            client.register("r", shm.name)
        shm.unlink()
        if os.geteuid() == 0:
            shm.write_bytes(bytes(64))
            os.chown(shm, 12345, 12345)
            with refused(NOT_FOUND):
                client.register("r", shm.name)
    finally:
        shm.unlink(missing_ok=True)


def test_memory_that_shrinks_after_registration_is_an_error_of_its_owner_only(client: Client, key: str) -> None:
    client.register("r", key)
    os.truncate(f"/dev/shm{key}", 0)
    with refused(INVALID):
        client.infer(region="r", byte_size=64)
    assert client.names() == ["r"]


def test_a_name_is_registered_once(client: Client, key: str) -> None:
    client.register("r", key)
    with refused(INVALID):
        client.register("r", key)
    client.unregister("no such name")  # clients clear before they begin
    client.unregister("r")
    client.register("r", key)


@pytest.mark.parametrize("handle", [b"", b"x", bytes(63), bytes(65), bytes(4096)])
def test_handles_of_devices_are_measured_before_a_driver_sees_them(client: Client, handle: bytes) -> None:
    with refused(INVALID, NOT_FOUND):
        client.cuda(handle)
    for device in (-1, 99, 2**63 - 1):
        with refused(NOT_FOUND):
            client.cuda(bytes(64), device)


def test_unregistering_cuda_memory_succeeds_without_cuda(client: Client) -> None:
    request = pb.CudaSharedMemoryUnregisterRequest()
    client.call("CudaSharedMemoryUnregister", request, pb.CudaSharedMemoryUnregisterResponse)


def test_unregistering_during_inference_waits_for_it_or_lets_it_end(client: Client, key: str) -> None:
    stop = time.monotonic() + 2
    rounds = 0
    while time.monotonic() < stop:
        client.register("r", key)
        way = client.channel.unary_unary(SERVICE + "ModelInfer")
        request = pb.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[A.tobytes()])
        for name in ("a", "b"):
            request.inputs.add(name=name, datatype="FP32", shape=[4, 4])
        request.inputs[0].parameters["shared_memory_region"].string_param = "r"
        request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
        calls = [way.future(request.SerializeToString(), timeout=60) for _ in range(8)]
        client.unregister("r")
        for item in calls:
            code = item.code()
            assert code in (grpc.StatusCode.OK, NOT_FOUND), item.details()
            if code is grpc.StatusCode.OK:
                reply = pb.ModelInferResponse.FromString(item.result())
                assert reply.raw_output_contents[0] == (A @ A).tobytes()
        rounds += 1
    assert rounds > 1


KILLED = """
import grpc, sys, time
sys.path[:0] = {path!r}
from test_shared_memory_holes import Client
client = Client({address!r})
client.register("left", {key!r})
print("registered", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.extended
def test_regions_of_a_killed_client_go_with_its_connection(kind: str, server: ServerProcess, key: str) -> None:
    address = server.addresses[kind == "tcp"]
    text = KILLED.format(path=sys.path, address=address, key=key)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "registered\n"
        held = f"/dev/shm{key}"
        assert held in server.descriptors()
        process.kill()
    deadline = time.monotonic() + WAIT_S
    while held in server.descriptors():
        assert time.monotonic() < deadline, "the region outlives its client"
        time.sleep(0.1)


def test_the_numbers_of_fields_are_those_of_other_clients() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2", reason="tritonclient is not installed")
    from tritonclient.grpc import model_config_pb2

    known = {**theirs.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}

    def fields(message: Any) -> dict[str, tuple[int, int, bool]]:
        return {item.name: (item.number, item.type, item.is_repeated) for item in message.fields}

    def compare(ours: Any, other: Any) -> None:
        assert fields(ours).items() <= fields(other).items(), ours.full_name
        nested = {item.name: item for item in other.nested_types}
        for item in ours.nested_types:
            compare(item, nested[item.name])

    assert len(pb.DESCRIPTOR.message_types_by_name) > 40
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        compare(message, known[name])
    methods = {item.name for item in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert methods == {item.name for item in theirs.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}


@pytest.mark.extended
def test_an_address_of_its_own_serves_this_protocol_alone(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GEMM, kserve_listen=f"unix:{tmp_path}/k.sock", cpu_threads=1) as own:
        live = pb.ServerLiveRequest()
        client = Client(f"unix:{tmp_path}/k.sock")
        assert client.call("ServerLive", live, pb.ServerLiveResponse).live
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            client.channel.unary_unary("/tilewright.v1.Kernels/Statistics")(b"", timeout=60)
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            Client(own.addresses[0]).call("ServerLive", live, pb.ServerLiveResponse)
        assert own.stop() == 0, own.log()


def test_users_of_one_socket_share_their_own_memory_only(tmp_path: Path) -> None:
    own, others = (Path(f"/dev/shm/kserve_{name}_{os.getpid()}") for name in ("own", "others"))
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(folder_for_all())
        server = stack.enter_context(ServerProcess(place, GEMM, socket_mode="666"))
        address, _ = stack.enter_context(forwarded(server, place, STRANGER))
        for path in (own, others):
            stack.callback(path.unlink, missing_ok=True)
            path.write_bytes(A.tobytes())
        os.chown(own, STRANGER, STRANGER)
        stranger = Client(address)
        stranger.register("r", own.name)
        assert stranger.infer(region="r", byte_size=64).raw_output_contents == [(A @ A).tobytes()]
        with refused(NOT_FOUND):
            stranger.register("s", others.name)
        server_user = Client(server.addresses[0])
        assert (server_user.names(), stranger.names()) == ([], ["r"])
