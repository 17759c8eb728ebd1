"""Memory of devices over the local socket: descriptors come in and go out, and none is left behind."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeDevice, FakeEngine
from local_harness import BIND, EXPORT, HEADER, REGISTER, Wire, bind_request, expect
from rpc_harness import MemoryFile, eventually, in_region

from tilewright_kit.contract.device import Buffer
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import DeviceError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.endpoints.local.server import LocalServer
from tilewright_server.endpoints.rpc.access.gate import Gate
from tilewright_server.endpoints.rpc.services.memory import MemoryServicer
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import Selection
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.service import Service
from tilewright_server.session.sessions import Sessions

UUID = "GPU-0a0a0a0a-2222-3333-4444-555555555555"


class Gpu(FakeDevice):
    """A device whose memory is files: what it imports it maps, what it exports is a file."""

    def __init__(self) -> None:
        super().__init__("gpu")
        self.info.attributes["uuid"] = self.uuid = UUID
        self.handles: list[MemoryHandle] = []
        self.mapped: dict[int, mmap.mmap] = {}

    def allocate_shared(self, nbytes: int) -> Buffer:
        return self.allocate(nbytes)

    def import_memory(self, handle: MemoryHandle) -> Buffer:
        self.handles.append(handle)
        if handle.kind == "cuda_pool" and handle.data != b"p" * 64:
            raise DeviceError("the pool has no such pointer", rule="cuda_pool", fix="export it again")
        made = self.allocate(handle.nbytes)
        self.mapped[made.address] = mmap.mmap(handle.fd, handle.offset + handle.nbytes)
        self.write(made, 0, memoryview(self.mapped[made.address])[handle.offset :])
        return made

    def release_memory(self, buffer: Buffer) -> None:
        self.mapped.pop(buffer.address).close()
        self.free(buffer)

    def export_memory(self, buffer: Buffer) -> MemoryHandle:
        fd = os.memfd_create("exported", os.MFD_CLOEXEC)
        os.ftruncate(fd, buffer.nbytes)
        data = bytearray(buffer.nbytes)
        self.read(buffer, 0, memoryview(data))
        os.pwrite(fd, data, 0)
        return MemoryHandle("fd", b"", buffer.nbytes, fd, 0)


class House:
    def __init__(self, folder: Path) -> None:
        self.device = Gpu()
        engine: Any = FakeEngine(self.device)
        self.sessions = Sessions()
        self.service = Service(engine, self.sessions, 4096, 8192)
        self.session = self.sessions.open("", local=True)
        self.server = LocalServer(self.service, folder / "s.sock.local", 4)
        self.server.start()

    def plan(self) -> int:
        desc = TensorDesc.of("fp32", (16,))
        request = OperationRequest("copy", {"x": desc}, {"y": desc})
        return self.service.plan(self.session.token, request, Selection(), Call())[0]

    def connect(self) -> Wire:
        return Wire(str(self.server.path), self.session.token)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    assert made.server.close(timeout=5)
    made.service.close()
    assert made.sessions.close_all(timeout=30)
    assert not made.device.live
    assert not made.device.mapped


def own_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("kind", ["device_fd", "cuda_pool"])
def test_memory_comes_by_its_descriptor(house: House, file: MemoryFile, kind: str) -> None:
    file.bytes[256:320] = bytes(range(64))
    source: dict[str, Any] = {"device_uuid": UUID, "offset": 256}
    if kind == "cuda_pool":
        source["pointer"] = b"p" * 64
    with house.connect() as wire:
        before = own_descriptors()
        request = mp.RegisterRegionRequest(bytes=512, **{kind: source})
        reply = wire.call(REGISTER, request, [file.fd])
        assert reply.error is None, reply.error
        told = mp.RegisterRegionReply.FromString(reply.payload)
        assert (told.region, told.device, told.zero_copy) == (reply.value, "gpu:0", True)
        handle = house.device.handles[0]
        assert (handle.kind, handle.offset, handle.nbytes) == ("fd" if kind == "device_fd" else kind, 256, 512)
        assert eventually(lambda: own_descriptors() <= before + 1), (
            "the mapping has one of its own; the one that came is closed"
        )
        region = reply.value
        binding = wire.bind(house.plan(), in_region(region), in_region(region, 128))
        assert wire.launch(binding).error is None
        part = bytearray(64)
        house.session.region(region).read(128, memoryview(part))
        assert part == bytes(range(64))
    assert eventually(lambda: not house.device.mapped), "the end of the connection is the end of the region"


def test_memory_of_several_parts_comes_by_as_many_descriptors(house: House, file: MemoryFile) -> None:
    with house.connect() as wire:
        before = own_descriptors()

        def register(parts: list[int], count: int, nbytes: int = 8000) -> Any:
            source = {"device_uuid": UUID, "offset": 64, "part_bytes": parts}
            return wire.call(REGISTER, mp.RegisterRegionRequest(bytes=nbytes, device_fd=source), [file.fd] * count)

        assert register([4096] * 2, 2).error is None
        handle = house.device.handles[0]
        assert (handle.part_bytes, len(handle.fds), handle.fds[0]) == ((4096, 4096), 2, handle.fd)
        assert register([4096] * 128, 128).error is None
        for count in (1, 3):
            expect(register([4096] * 2, count), "invalid_argument", "region_descriptor")
        for parts, nbytes in (([4096, 4096], 8192), ([8192, 0], 64), ([1 << 63] * 2, 64), ([2**64 - 1], 64)):
            expect(register(parts, len(parts), nbytes), "invalid_argument", "memory_parts")
        assert eventually(lambda: own_descriptors() <= before + 2)
    assert eventually(lambda: not house.device.mapped)


def test_descriptors_of_memory_that_is_refused_are_closed(house: House, file: MemoryFile) -> None:
    with house.connect() as wire:
        before = own_descriptors()
        for _ in range(10):
            request = mp.RegisterRegionRequest(bytes=64, cuda_pool={"device_uuid": UUID, "pointer": b"q" * 64})
            expect(wire.call(REGISTER, request, [file.fd]), "device_error", "cuda_pool")
            request = mp.RegisterRegionRequest(bytes=64, device_fd={"device_uuid": UUID[:-1]})
            expect(wire.call(REGISTER, request, [file.fd]), "not_found", "device_uuid")
            expect(wire.call(REGISTER, request), "invalid_argument", "region_descriptor")
        assert eventually(lambda: own_descriptors() <= before)


def test_exported_memory_goes_by_its_descriptor(house: House) -> None:
    buffer = house.session.create_buffer(
        4096, lambda size: ResidentBuffer(house.device, size, exportable=True), on_host=False
    )  # type: ignore[arg-type]
    buffer.write(0, memoryview(b"hello"))
    before = own_descriptors()
    with house.connect() as wire:
        wire.sequence += 1
        wire.send(
            HEADER.pack(2, 0, 0, wire.sequence, EXPORT) + mp.ExportBufferRequest(buffer=buffer.id).SerializeToString()
        )
        data, fds = _receive(wire)
        reply = mp.ExportBufferReply.FromString(data[16:])
        assert (reply.kind, reply.bytes, reply.device) == (mp.ExportBufferReply.FILE_DESCRIPTOR, 4096, "gpu:0")
        assert reply.device_uuid == UUID
        assert os.pread(fds[0], 5, reply.offset) == b"hello"
        assert house.session.objects()[1][0].exported
        os.close(fds[0])
    assert eventually(lambda: own_descriptors() <= before)


def _receive(wire: Wire) -> tuple[bytes, list[int]]:
    import socket

    data, fds, _, _ = socket.recv_fds(wire.socket, 4096, 4)
    return data, list(fds)


def test_grpc_cannot_carry_a_descriptor(house: House) -> None:
    buffer = house.session.create_buffer(
        4096, lambda size: ResidentBuffer(house.device, size, exportable=True), on_host=False
    )  # type: ignore[arg-type]
    servicer = MemoryServicer(house.service, SimpleNamespace(), mp.SessionEvent.Opened(), Gate())  # type: ignore[arg-type]
    before = own_descriptors()
    context: Any = None
    with pytest.raises(UnsupportedError) as caught:
        servicer.export_buffer(mp.ExportBufferRequest(session=house.session.token, buffer=buffer.id), context)
    assert caught.value.rule == "export_descriptor"
    assert own_descriptors() <= before


def test_operands_of_two_places_do_not_bind(house: House, file: MemoryFile) -> None:
    with house.connect() as wire:
        host = wire.register(file)
        request = mp.RegisterRegionRequest(bytes=512, device_fd={"device_uuid": UUID})
        device = wire.call(REGISTER, request, [file.fd]).value
        reply = wire.call(BIND, bind_request(house.plan(), in_region(device), in_region(host)))
        error = expect(reply, "invalid_argument", "binding_in_place")
        assert error.field == "y.location"
