"""What operands hold is looked at before every launch, in the process that can read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from vector_operation import VectorOperation, VectorProblem, request

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import Outcome, Selection
from tilewright_server.service import Service
from tilewright_server.session.operands.operand_binding import Location, Place
from tilewright_server.session.sessions import Sessions

N = 30


class Looking:
    """Makes a vector operation look at x: no element may be above 100. Remembers what it saw."""

    def __init__(self, engine: Engine) -> None:
        operation: Any = engine.operations["vector"]
        assert isinstance(operation, VectorOperation)
        operation.value_operands = lambda problem: ("x",) if problem.out.size > 1 else ()
        operation.check_values = self.check
        self.seen: list[np.ndarray] = []

    def check(self, problem: VectorProblem, values: Mapping[str, Any]) -> None:
        assert set(values) == {"x"}
        assert values["x"].shape == problem.x.shape
        self.seen.append(values["x"])
        if values["x"].max() > 100:
            index = int(values["x"].argmax())
            raise InvalidArgumentError("too large", field=f"x[{index}]", rule="vector_values", fix="give less")


def call() -> Call:
    return Call.within(60)


def vectors(n: int = N) -> list[np.ndarray]:
    return [np.arange(n, dtype=np.float32), np.full(n, 60, np.float32), np.full(n, np.nan, np.float32)]


def addresses(arrays: list[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def test_every_launch_looks_at_what_is_there_by_then(engine: Engine) -> None:
    looking = Looking(engine)
    prepared = engine.plan(request(N), Selection(), call())
    x, y, out = arrays = vectors()
    engine.execute(prepared, addresses(arrays), call())
    np.testing.assert_array_equal(out, x + y)
    np.testing.assert_array_equal(looking.seen[-1], x)
    assert not np.shares_memory(looking.seen[-1], x)
    x[7] = 101
    out[:] = np.nan
    with pytest.raises(InvalidArgumentError) as caught:
        engine.execute(prepared, addresses(arrays), call(), 3)
    assert (caught.value.field, caught.value.rule) == ("x[7]", "vector_values")
    assert np.isnan(out).all(), "nothing may run"
    x[7] = 100
    engine.execute(prepared, addresses(arrays), call(), 3)
    assert out[7] == 160


def test_an_execution_sees_what_the_one_before_it_in_its_batch_wrote(engine: Engine) -> None:
    Looking(engine)
    prepared = engine.plan(request(N), Selection(), call())
    x, y, middle = vectors()
    out, other = (np.full(N, np.nan, np.float32) for _ in range(2))
    chain = [
        (prepared, addresses([x, y, middle]), 1),
        (prepared, addresses([middle, y, out]), 1),
        (prepared, addresses([out, y, other]), 1),
        (prepared, addresses([x, y, middle]), 1),
    ]
    first, second, third, last = engine.execute_many(chain, call())
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome), "middle holds 60 to 89"
    assert isinstance(third, InvalidArgumentError), "out holds 120 and more"
    assert isinstance(last, Outcome)
    assert np.isnan(other).all()


def test_problems_without_such_operands_are_not_looked_at(engine: Engine) -> None:
    looking = Looking(engine)
    prepared = engine.plan(request(1), Selection(), call())
    arrays = vectors(1)
    arrays[0][0] = 500
    engine.execute(prepared, addresses(arrays), call())
    assert arrays[2][0] == 560
    assert looking.seen == []


def test_host_memory_on_its_way_to_a_device_is_looked_at(make_engine: Callable[..., Engine]) -> None:
    """The device is in another process: what lies there cannot be read, and is left to kernels."""
    engine = make_engine(cpu_isolated=True)
    looking = Looking(engine)
    service = Service(engine, Sessions(), 1 << 20, 1 << 20)
    try:
        x, y, _ = vectors()

        def run() -> Any:
            locations = {
                "x": Location(Place.INLINE, data=x.tobytes()),
                "y": Location(Place.INLINE, data=y.tobytes()),
                "out": Location(Place.RETURN),
            }
            result = service.run(b"", request(N), locations, Selection(), call())
            return np.frombuffer(result.outputs[0].data, np.float32)

        np.testing.assert_array_equal(run(), x + y)
        np.testing.assert_array_equal(looking.seen[-1], x)
        x[3] = 1e6
        with pytest.raises(InvalidArgumentError, match="too large"):
            run()
        device: Any = engine.devices.get()
        prepared = engine.plan(request(N), Selection(), call())
        buffers = [device.allocate(4 * N) for _ in range(3)]
        for buffer, array in zip(buffers, (x, y), strict=False):
            device.write(buffer, 0, memoryview(array).cast("B"))
        count = len(looking.seen)
        engine.execute(prepared, [buffer.address for buffer in buffers], call())
        assert len(looking.seen) == count
    finally:
        service.sessions.close_all(timeout=5.0)
        service.close()
