"""Connections that devices serve by themselves: what their workspace is charged to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.contract import ConnectedDevice, Program
from tilewright_server.engine.execution.executor import Executor
from tilewright_server.engine.execution.workspace_arena import Arena
from tilewright_server.engine.statistics import Statistics
from tilewright_server.session.attachments import Attachment
from tilewright_server.session.operands.bindings import BoundExecution
from tilewright_server.session.session import Session

LIMIT = 1 << 20


class Device:
    """Writes down what it was told."""

    info = SimpleNamespace(id="gpu:0")

    def __init__(self) -> None:
        self.bound: dict[int, int] = {}
        self.refuses = False

    def attach(self, fd: int, connection: int, ended: Callable[[], None]) -> None:
        raise AssertionError("nobody attaches anything here")

    def bind(
        self, connection: int, binding: int, program: Program, addresses: Sequence[int], workspace_bytes: int
    ) -> None:
        if self.refuses:
            raise DeviceError("no", rule="test")
        self.bound[binding] = workspace_bytes

    def unbind(self, connection: int, binding: int) -> None:
        self.bound.pop(binding, None)

    def detach(self, connection: int) -> None:
        raise AssertionError("nobody detaches anything here")


class House:
    def __init__(self) -> None:
        self.device = Device()
        self.arena = Arena(cast(Any, self.device), LIMIT)
        self.executor = Executor(cast(Any, self.device), 1, self.arena, Statistics(), 1)

    def attachment(self) -> Attachment:
        return Attachment(cast(Session, None), cast(ConnectedDevice, self.device), "gpu:0")

    def bound(self, number: int, workspace: int) -> BoundExecution:
        prepared = SimpleNamespace(program=object(), executor=self.executor, workspace_bytes=workspace)
        binding = SimpleNamespace(addresses=())
        return cast(BoundExecution, SimpleNamespace(id=number, prepared=prepared, binding=binding))

    @property
    def charged(self) -> int:
        return self.executor.workspace_bytes


@pytest.fixture
def house() -> House:
    return House()


def test_a_connection_is_charged_for_its_largest_binding(house: House) -> None:
    one, other = house.attachment(), house.attachment()
    bounds = [house.bound(number, workspace) for number, workspace in enumerate((0, 4096, 65536, 256))]
    for bound, charged in zip(bounds, (0, 4096, 65536, 65536), strict=True):
        one.publish(bound)
        assert house.charged == charged
    other.publish(bounds[1])
    assert house.charged == 65536 + 4096
    one.withdraw(bounds[2])
    assert house.charged == 65536 + 4096, "the connection's workspace stays as large as it is"
    for bound in (bounds[1], bounds[3], bounds[1]):
        one.withdraw(bound)
    assert house.charged == 4096
    other.end()
    assert house.charged == 0
    other.publish(bounds[1])  # after the end nothing is taken
    assert house.charged == 0


def test_nothing_is_bound_beyond_the_limit(house: House) -> None:
    one, other = house.attachment(), house.attachment()
    one.publish(house.bound(1, LIMIT - 4096))
    with pytest.raises(ResourceExhaustedError) as caught:
        other.publish(house.bound(2, 8192))
    assert (caught.value.rule, caught.value.field) == ("workspace_limit", "workspace_bytes")
    assert list(house.device.bound) == [1]
    with pytest.raises(ResourceExhaustedError):
        one.publish(house.bound(3, LIMIT + 1))
    other.publish(house.bound(2, 4096))
    assert house.charged == LIMIT


def test_what_the_device_refuses_is_not_charged(house: House) -> None:
    attachment = house.attachment()
    house.device.refuses = True
    with pytest.raises(DeviceError):
        attachment.publish(house.bound(1, 8192))
    assert house.charged == 0
    house.device.refuses = False
    attachment.publish(house.bound(2, 4096))
    house.device.refuses = True
    with pytest.raises(DeviceError):
        attachment.publish(house.bound(3, 8192))
    assert house.charged == 4096
