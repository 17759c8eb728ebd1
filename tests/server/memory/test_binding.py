"""Binding operands to memory, on devices that share the host's memory and on devices that do not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeDevice, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from rpc_harness import MemoryFile, register

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import Selection
from tilewright_server.memory.shm import view
from tilewright_server.memory.staging_pool import KEPT_BYTES, StagingPool
from tilewright_server.service import Service
from tilewright_server.session.operands.operand_binding import Location, Place, Target
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions
from tilewright_server.session.transfer import check_range

TEXT = bytes(range(64))


class House:
    """A service over a fake device of a kind, with one session and one region."""

    def __init__(self, kind: str, file: MemoryFile) -> None:
        self.device = FakeDevice(kind)
        self.engine: Any = FakeEngine(self.device)
        self.sessions = Sessions()
        self.service = Service(self.engine, self.sessions, inline_limit=4096, reply_limit=8192)
        self.session: Session = self.sessions.open("", local=True)
        self.file = file
        self.region = register(self.session, file)

    def copy(self, x: Location, y: Location | None = None, desc: TensorDesc | None = None, out: Any = None) -> Any:
        desc = desc or TensorDesc.of("fp32", (16,))
        request = OperationRequest("copy", {"x": desc}, {"y": out} if out else {})
        locations = {"x": x} | ({"y": y} if y else {})
        return self.service.run(self.session.token, request, locations, Selection(), Call())


@pytest.fixture(params=["cpu", "gpu"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["sealed", "unsealed"])
def house(request: pytest.FixtureRequest, kind: str) -> Iterator[House]:
    file = MemoryFile(4096, sealed=request.param)
    house = House(kind, file)
    yield house
    house.service.close()
    assert house.sessions.close_all(timeout=30)
    assert not house.device.live, "no device memory is left behind"
    file.close()


def in_region(house: House, offset: int = 0) -> Location:
    return Location(Place.REGION, house.region.id, offset)


def test_operands_in_regions_arrive_and_return(house: House) -> None:
    house.file.bytes[:64] = TEXT
    result = house.copy(in_region(house), in_region(house, 128))
    assert house.file.bytes[128:192] == TEXT
    in_place = house.region.zero_copy and house.device.info.kind == "cpu"
    assert result.bytes_copied == (0 if in_place else 128)
    assert house.engine.copied == result.bytes_copied


def test_inline_operands_arrive_and_return(house: House) -> None:
    result = house.copy(Location(Place.INLINE, data=TEXT))
    assert result.outputs[0].data == TEXT
    assert result.outputs[0].name == "y"


def test_new_buffers_belong_to_the_session(house: House) -> None:
    result = house.copy(Location(Place.INLINE, data=TEXT), Location(Place.ALLOCATE))
    buffer = house.session.buffer(result.outputs[0].buffer)
    assert house.service.read_buffer(house.session.token, buffer.id, 0, 64, None) == TEXT
    back = house.copy(Location(Place.BUFFER, buffer.id), in_region(house))
    assert house.file.bytes[:64] == TEXT
    assert not back.outputs


def test_gaps_of_strided_outputs_are_kept(house: House) -> None:
    house.file.bytes[:256] = b"\xee" * 256
    strided = TensorDesc.of("fp32", (4, 2), (4, 1))
    house.copy(Location(Place.INLINE, data=bytes(32)), in_region(house), TensorDesc.of("fp32", (4, 2)), strided)
    assert house.file.bytes[:64] == (bytes(8) + b"\xee" * 8) * 4
    returned = house.copy(
        Location(Place.INLINE, data=TEXT[:32]), Location(Place.RETURN), TensorDesc.of("fp32", (4, 2)), strided
    ).outputs[0]
    assert returned.data == TEXT[:32]
    assert returned.desc.is_contiguous


def test_a_failure_midway_gives_everything_back(house: House) -> None:
    house.file.bytes[:64] = TEXT

    def fail(*_: object) -> None:
        raise InvalidArgumentError("no")

    house.engine.execute = fail
    for y in (Location(Place.ALLOCATE), Location(Place.RETURN), in_region(house, 256)):
        with pytest.raises(InvalidArgumentError):
            house.copy(in_region(house), y)
    assert house.region.pins == 0
    assert not house.session.objects()[1]


def test_staging_memory_is_reused_and_bounded() -> None:
    device = FakeDevice()
    pool = StagingPool(device)
    first = pool.take(5000)
    address = first.address
    first.give_back()
    second = pool.take(8000)
    assert second.address == address
    second.clear()
    assert bytes(view(address, 8000)) == bytes(8000)
    second.give_back()
    blocks = [pool.take(16 << 20) for _ in range(8)]
    for block in blocks:
        block.give_back()
    assert sum(ctypes.sizeof(block) for block in device.live.values()) <= KEPT_BYTES + (1 << 20)
    pool.close()
    assert not device.live


def test_packed_outputs_never_carry_what_was_there_before() -> None:
    file = MemoryFile(4096)
    house = House("cpu", file)
    staging = house.service.staging("cpu:0").take(4096)
    view(staging.address, 4096)[:] = b"s" * 4096  # a secret of another session
    staging.give_back()
    packed = TensorDesc(DType.FP32, (4,), (1,), "tiles", 256)
    result = house.copy(Location(Place.INLINE, data=bytes(16)), None, TensorDesc.of("fp32", (4,)), packed)
    assert result.outputs[0].data == bytes(256)
    house.service.close()
    house.sessions.close_all(1)
    file.close()


@given(
    offset=st.integers(0, 2**64 - 1) | st.integers(4000, 4200),
    rows=st.integers(0, 2**20),
    columns=st.integers(0, 2**20),
    stride=st.integers(0, 2**24),
)
def test_nothing_is_ever_bound_outside_its_region(offset: int, rows: int, columns: int, stride: int) -> None:
    file = MemoryFile(4096)
    house = House("cpu", file)
    try:
        desc = TensorDesc.of("fp16", (rows, columns), (stride, 1))
        prepared = house.engine.plan(OperationRequest("copy", {"x": desc}), Selection(), Call())
        target = Target(prepared)
        here = in_region(house, offset)
        binding = house.service.binder.bind(target, [here, here], house.session)
        start, end = house.region.address, house.region.address + 4096
        for address in binding.addresses:
            assert desc.nbytes == 0 or start <= address <= address + desc.nbytes <= end
            assert address % 2 == 0
    except TilewrightError as error:
        assert isinstance(error, InvalidArgumentError)
    finally:
        house.sessions.close_all(1)
        file.close()


def test_unknown_ids_and_sessions_are_named_by_operand(house: House) -> None:
    for location in (Location(Place.REGION, 1), Location(Place.BUFFER, 1)):
        with pytest.raises(NotFoundError):
            house.copy(location)
        with pytest.raises(NotFoundError):
            request = OperationRequest("copy", {"x": TensorDesc.of("fp32", (16,))})
            house.service.run(b"", request, {"x": location}, Selection(), Call())


@pytest.mark.parametrize(
    ("offset", "nbytes", "size"), [(-1, 1, 10), (0, -1, 10), (11, 0, 10), (5, 6, 10), (2**64, 2**64, 10)]
)
def test_ranges_outside_are_refused(offset: int, nbytes: int, size: int) -> None:
    with pytest.raises(InvalidArgumentError):
        check_range("buffer", offset, nbytes, size)
    check_range("buffer", 4, 6, 10)
