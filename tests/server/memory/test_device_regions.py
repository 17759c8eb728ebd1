"""Memory of devices that clients allocated: who may hand it over, where it can be used, and when it is let go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeDevice, FakeEngine
from rpc_harness import MemoryFile, register

from tilewright_kit.contract.device import Buffer
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import (
    AccessError,
    DeadlineError,
    DeviceError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TilewrightError,
    UnsupportedError,
)
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.devices.lifetime import DeviceAddress, Lifetime
from tilewright_server.endpoints.messages.regions import exported
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import Selection
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.device_regions import exportable_bytes, plain_uuid
from tilewright_server.service import Service, placed
from tilewright_server.session.operands.bindings import BoundExecution
from tilewright_server.session.operands.operand_binding import Location, Place, Target
from tilewright_server.session.quotas import Limits
from tilewright_server.session.region_sources import DeviceMemory
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"
HANDLE = bytes(range(64))


class SharingFake(FakeDevice):
    """A device with memory of its own that can be handed over: a legacy handle names the memory by its first byte."""

    def __init__(self, kind: str = "gpu", number: int = 0, uuid: str = UUID) -> None:
        super().__init__(kind)
        self.info.id = f"{kind}:{number}"
        self.info.attributes["uuid"] = self.uuid = uuid
        self.mapped: dict[int, MemoryHandle] = {}
        self.life = Lifetime()
        self.fails: TilewrightError | None = None

    def import_memory(self, handle: MemoryHandle) -> Buffer:
        if handle.data and handle.data != HANDLE:
            raise DeviceError("the driver knows no such handle", rule="cuda_ipc", fix="send it as the driver gave it")
        made = self.allocate(handle.nbytes)
        self.mapped[made.address] = handle
        return Buffer(DeviceAddress(made.address, self.life), handle.nbytes)

    def release_memory(self, buffer: Buffer) -> None:
        del self.mapped[int(buffer.address)]
        self.free(buffer)
        if self.fails is not None:
            raise self.fails

    def allocate_shared(self, nbytes: int) -> Buffer:
        return self.allocate(nbytes)

    def export_memory(self, buffer: Buffer) -> MemoryHandle:
        return MemoryHandle("cuda_ipc", HANDLE, buffer.nbytes)


class House:
    """A service over two such devices, with one session."""

    def __init__(self) -> None:
        self.one, self.two = SharingFake(), SharingFake(number=1, uuid=OTHER)
        self.engine: Any = FakeEngine(self.one)
        devices = {"gpu:0": self.one, "gpu:1": self.two, "": self.one}
        self.engine.devices.get = lambda name="": devices[name]
        self.engine.devices.infos = lambda: (self.one.info, self.two.info)
        self.sessions = Sessions(Limits(regions=4, bindings=3))
        self.service = Service(self.engine, self.sessions, inline_limit=4096, reply_limit=8192)
        self.session: Session = self.sessions.open("", local=True)

    def register(self, nbytes: int = 4096, uuid: str = UUID, data: bytes = HANDLE, **more: Any) -> Any:
        return self.service.register(self.session, DeviceMemory("cuda_ipc", uuid, data, **more), nbytes)

    def plan(self, selection: Selection | None = None, **locations: Location) -> tuple[int, Target]:
        desc = TensorDesc.of("fp32", (16,))
        request = OperationRequest("copy", {"x": desc}, {"y": desc})
        return self.service.plan(self.session.token, request, selection or Selection(), Call(), locations)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.service.close()
    assert made.sessions.close_all(timeout=30)
    for device in (made.one, made.two):
        assert not device.live
        assert not device.mapped, "nothing stays mapped"


def at(region: Any, offset: int = 0) -> Location:
    return Location(Place.REGION, region.id, offset)


def test_a_region_is_on_its_device(house: House) -> None:
    region = house.register(offset=512)
    assert (region.device_id, region.zero_copy, region.size) == ("gpu:0", True, 4096)
    handle = next(iter(house.one.mapped.values()))
    assert (handle.kind, handle.data, handle.offset, handle.nbytes) == ("cuda_ipc", HANDLE, 512, 4096)
    assert house.register(uuid=OTHER).device_id == "gpu:1"


@pytest.mark.parametrize("spelling", [UUID, UUID.removeprefix("GPU-"), UUID.lower(), "gpu-" + UUID[4:].upper()])
def test_a_uuid_is_known_however_it_is_written(house: House, spelling: str) -> None:
    assert house.register(uuid=spelling).device_id == "gpu:0"
    assert plain_uuid(spelling) == plain_uuid(UUID)


@pytest.mark.parametrize("uuid", ["", "GPU-", "gpu:0", "GPU-11111111-2222-3333-4444-555555555556"])
def test_memory_of_a_gpu_that_is_not_there_is_refused(house: House, uuid: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        house.register(uuid=uuid)
    assert caught.value.rule == "device_uuid"
    assert "gpu:0" in caught.value.fix


def test_handles_and_sizes_are_checked_before_the_driver_is_asked(house: House) -> None:
    for nbytes in (0, -1, 2**46 + 1):
        with pytest.raises(InvalidArgumentError, match="at least one byte"):
            house.register(nbytes)
    for offset in (-1, 2**46 + 1):
        with pytest.raises(InvalidArgumentError, match="no allocation"):
            house.register(offset=offset)
    with pytest.raises(InvalidArgumentError, match="64 bytes"):
        house.register(data=HANDLE[:63])
    with pytest.raises(DeviceError, match="no such handle"):
        house.register(data=bytes(64))
    assert not house.session.objects()[0]


def test_regions_of_devices_count_and_need_a_local_client(house: House) -> None:
    for _ in range(4):
        house.register()
    with pytest.raises(ResourceExhaustedError, match="4 regions"):
        house.register()
    assert len(house.one.mapped) == 4
    remote = house.sessions.open("", local=False)
    with pytest.raises(AccessError):
        house.service.register(remote, DeviceMemory("cuda_ipc", UUID, HANDLE), 64)


def test_a_device_that_cannot_share_says_so(house: House) -> None:
    plain = FakeDevice("gpu")
    plain.info.attributes["uuid"] = UUID
    house.engine.devices.infos = lambda: (plain.info,)
    house.engine.devices.get = lambda name="": plain
    with pytest.raises(UnsupportedError, match="cannot share"):
        house.register()


def test_a_plan_follows_its_operands(house: House) -> None:
    one, two = house.register(), house.register(uuid=OTHER)
    chosen = [
        placed(house.session, {"x": at(one), "y": at(one, 64)}, Selection()),
        placed(house.session, {"x": at(two)}, Selection()),
        placed(house.session, {}, Selection()),
        placed(None, {}, Selection()),
        placed(house.session, {"x": at(two)}, Selection(device="gpu:0")),
    ]
    assert [item.device for item in chosen] == ["gpu:0", "gpu:1", "", "", "gpu:0"]
    with pytest.raises(InvalidArgumentError, match=r"x is on gpu:0, but y is on gpu:1") as caught:
        placed(house.session, {"x": at(one), "y": at(two)}, Selection())
    assert caught.value.rule == "operand_devices"
    buffer = house.session.create_buffer(64, lambda size: _buffer(house.two, size), on_host=False)
    assert placed(house.session, {"x": Location(Place.BUFFER, buffer.id)}, Selection()).device == "gpu:1"


def _buffer(device: Any, size: int, *, exportable: bool = False) -> Any:
    return ResidentBuffer(device, size, exportable=exportable)


def test_host_and_device_operands_choose_the_device(house: House) -> None:
    file = MemoryFile(4096)
    host = register(house.session, file)
    mixed = placed(house.session, {"x": at(host), "y": at(house.register())}, Selection())
    assert mixed.device == "gpu:0"
    file.close()


def test_the_wrong_device_is_named_with_the_right_one(house: House) -> None:
    region = house.register(uuid=OTHER)
    _, target = house.plan()
    with pytest.raises(InvalidArgumentError) as caught:
        house.service.binder.bind(target, [at(region), at(region, 64)], house.session)
    error = caught.value
    assert (error.rule, error.field, error.value) == ("region_device", "x", "gpu:1")
    assert "gpu:1" in error.reason and "gpu:0" in error.reason
    assert "plan for gpu:1" in error.fix


def test_a_host_plan_does_not_take_device_memory(house: House) -> None:
    region = house.register()
    house.engine.device = FakeDevice("cpu")
    _, target = house.plan()
    with pytest.raises(InvalidArgumentError, match="is in a region on gpu:0, but the plan is for cpu:0"):
        house.service.binder.bind(target, [at(region), at(region, 64)], house.session)


@pytest.mark.parametrize(
    ("offset", "rule"), [(4096 - 60, "location_bounds"), (2**63, "location_bounds"), (2, "offset_alignment")]
)
def test_bounds_hold_on_devices(house: House, offset: int, rule: str) -> None:
    region = house.register()
    _, target = house.plan()
    with pytest.raises(InvalidArgumentError) as caught:
        house.service.binder.bind(target, [at(region, offset), at(region)], house.session)
    assert caught.value.rule == rule


def test_a_region_that_begins_between_elements_is_refused(house: House) -> None:
    """The kernel would fault, and take the device from everybody."""
    region = house.register()
    region.address = region.address + 2
    _, target = house.plan()
    with pytest.raises(InvalidArgumentError) as caught:
        house.service.binder.bind(target, [at(region), at(region, 1024)], house.session)
    assert (caught.value.rule, caught.value.field, caught.value.value) == ("operand_alignment", "x", "2")


def test_operands_on_the_device_are_used_in_place(house: House) -> None:
    region = house.register()
    _, target = house.plan()
    binding = house.service.binder.bind(target, [at(region), at(region, 64)], house.session)
    assert binding.addresses == [region.address, region.address + 64]
    assert isinstance(binding.addresses[1], DeviceAddress), "it remembers the opening that it is of"
    assert binding.reusable


def test_memory_of_a_device_that_was_lost_is_refused(house: House) -> None:
    region = house.register()
    _, target = house.plan()
    house.one.life.lost = True
    with pytest.raises(TilewrightError, match="was on the device when it was lost") as caught:
        house.service.binder.bind(target, [at(region), at(region, 64)], house.session)
    assert caught.value.rule == "device_lost"


def test_copies_between_regions_and_buffers_work_on_devices(house: House) -> None:
    region = house.register()
    buffer = house.session.create_buffer(4096, lambda size: _buffer(house.one, size), on_host=False)
    token = house.session.token
    house.service.write_buffer(token, buffer.id, 0, bytes(range(200)), 0)
    house.service.read_buffer(token, buffer.id, 0, 200, (region.id, 100))
    house.service.write_buffer(token, buffer.id, 1000, (region.id, 100), 200)
    assert house.service.read_buffer(token, buffer.id, 1000, 200, None) == bytes(range(200))
    with pytest.raises(InvalidArgumentError):
        house.service.write_buffer(token, buffer.id, 0, (region.id, 4000), 200)


def test_a_pinned_region_stays_mapped(house: House) -> None:
    region = house.register()
    house.session.pin((region,))
    with pytest.raises(DeadlineError):
        house.session.unregister(region.id, deadline=0.0)
    assert len(house.one.mapped) == 1
    house.session.unpin((region,))
    assert not house.one.mapped


def test_a_region_that_cannot_be_unmapped_is_gone_all_the_same(house: House) -> None:
    region = house.register()
    house.one.fails = DeviceError("the driver has no time", rule="cuda", fix="wait")
    house.session.unregister(region.id)
    house.one.fails = None
    for _ in range(4):
        house.register()
    with pytest.raises(NotFoundError):
        house.session.region(region.id)


def test_what_a_connection_made_ends_with_it(house: House) -> None:
    owner = object()
    mine = house.service.register(house.session, DeviceMemory("cuda_ipc", UUID, HANDLE), 4096, owner)
    kept = house.register()
    plan, _ = house.plan()
    bound = house.service.bind(house.session, (plan, [at(kept), at(kept, 64)], 0), owner=owner)
    on_mine = house.service.bind(house.session, (plan, [at(mine), at(kept, 64)], 0))
    stays = house.service.bind(house.session, (plan, [at(kept), at(kept, 64)], 0))
    house.session.end_of(owner)
    assert [item.id for item in house.session.objects()[0]] == [kept.id]
    assert house.session.bindings() == [stays]
    for gone in (bound, on_mine):
        with pytest.raises(NotFoundError):
            house.service.launch(house.session, gone.id)
    assert house.service.launch(house.session, stays.id).device_ns == 1
    assert len(house.one.mapped) == 1


def test_bindings_have_a_quota(house: House) -> None:
    region = house.register()
    plan, _ = house.plan()
    for _ in range(3):
        house.service.bind(house.session, (plan, [at(region), at(region, 64)], 0))
    with pytest.raises(ResourceExhaustedError, match="3 bindings"):
        house.service.bind(house.session, (plan, [at(region), at(region, 64)], 0))
    assert region.pins == 3
    with pytest.raises(InvalidArgumentError, match="repeated"):
        house.service.bind(house.session, (plan, [at(region), at(region, 64)], 1_000_001))


def test_a_binding_of_what_ends_meanwhile_is_refused(house: House) -> None:
    region = house.register()
    plan, _ = house.plan()
    binding = house.service.binder.bind(house.session.plan(plan), [at(region), at(region, 64)], house.session)
    bound = BoundExecution(binding, binding.target.prepared)
    ended: list[str] = []

    def publish(made: BoundExecution) -> None:
        made.on_release = lambda: ended.append("told")
        with pytest.raises(DeadlineError):
            house.session.unregister(region.id, deadline=0.0)

    with pytest.raises(NotFoundError):
        house.session.bind(bound, publish)
    assert ended == ["told"]
    assert not house.one.mapped
    assert not house.session.bindings()


def test_unbinding_waits_for_a_launch(house: House) -> None:
    region = house.register()
    plan, _ = house.plan()
    bound = house.service.bind(house.session, (plan, [at(region), at(region, 64)], 0))
    house.session.pin((bound,))
    with pytest.raises(DeadlineError):
        house.session.unbind(bound.id, deadline=0.0)
    assert region.pins == 1
    house.session.unpin((bound,))
    assert region.pins == 0


def test_the_quota_counts_whole_blocks_of_what_can_be_exported(house: House) -> None:
    session = Sessions(Limits(buffer_bytes=3 << 20)).open("", local=True)

    def create(nbytes: int) -> ResidentBuffer:
        return session.create_buffer(
            nbytes,
            lambda size: _buffer(house.one, size, exportable=True),
            lambda size: exportable_bytes(house.one, size),
            on_host=False,
        )

    assert exportable_bytes(house.one, 1) == 1
    house.one.shared_granule = 2 << 20
    one = create(1)
    with pytest.raises(ResourceExhaustedError):
        create(1)
    session.free_buffer(one.id)
    with pytest.raises(ResourceExhaustedError):
        create((2 << 20) + 1)
    create(2 << 20)
    session.create_buffer(1 << 20, lambda size: _buffer(house.one, size), on_host=False)
    session.close()


def test_a_buffer_is_exported_by_its_handle(house: House) -> None:
    plain = house.session.create_buffer(64, lambda size: _buffer(house.one, size), on_host=False)
    with pytest.raises(InvalidArgumentError, match="was not made to be exported"):
        house.service.export_buffer(house.session, plain.id)
    buffer = house.session.create_buffer(4096, lambda size: _buffer(house.one, size, exportable=True), on_host=False)
    named, handle = house.service.export_buffer(house.session, buffer.id)
    reply = exported(named, handle)
    assert (reply.kind, reply.handle, reply.bytes) == (mp.ExportBufferReply.CUDA_IPC, HANDLE, 4096)
    assert (reply.device, reply.device_uuid) == ("gpu:0", UUID)
    assert buffer.exported
    house.session.free_buffer(buffer.id)
    with pytest.raises(NotFoundError):
        house.service.export_buffer(house.session, buffer.id)


def test_the_end_of_the_session_frees_all_of_it(house: House) -> None:
    region = house.register()
    plan, _ = house.plan()
    house.service.bind(house.session, (plan, [at(region), at(region, 64)], 0))
    house.register(uuid=OTHER)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    house.sessions.close(house.session)
    assert house.session.wait_released(1.0)
    assert not house.one.mapped and not house.two.mapped
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
