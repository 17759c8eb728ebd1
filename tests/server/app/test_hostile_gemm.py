"""Hostile requests to a server that really plans, compiles and runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from hostile import METHODS, Known, check_results, messages, request_of, send
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc_harness import Client, MemoryFile, ServerProcess, eventually, floats, in_region, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "gemm"]
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
DIMENSIONS = st.sampled_from([0, 1, 2, 7, 64, -1, 2**31, 2**48, 2**62, 2**63 - 1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("hostile"), COMMAND, cache_dir=kernel_cache) as process:
        yield process
        assert process.alive
        assert process.stop() == 0
        assert "internal error" not in process.log(), process.log()


@pytest.fixture(scope="module")
def victim(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as client:
        file = MemoryFile(1 << 16)
        Known.token = client.token
        Known.region = client.register(file).region
        inputs = [tp.Operand(name=name, spec=floats(8, 8)) for name in ("a", "b")]
        Known.plan = client.dispatch.Plan(dp.PlanRequest(session=client.token, operation="gemm", inputs=inputs)).plan
        Known.buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4096)).buffer
        yield client
    maps = Path(f"/proc/{server.pid}/maps")
    assert eventually(lambda: file.name not in maps.read_text())
    file.close()


TEXTS = ['{"pipeline": "\\ud800"}', '{"\\udfff": 1}', "[" * 60000, "null", "{" * 9]
TEXTS += ['{"tile_m": 1e999}', '{"tile_m": NaN}']


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_configurations_that_are_none_are_refused_by_every_call_that_takes_one(victim: Client, text: str) -> None:
    inputs = [tp.Operand(name=name, spec=floats(8, 8)) for name in ("a", "b")]
    plan = dp.PlanRequest(
        session=victim.token, operation="gemm", inputs=inputs, selection=dp.Selection(config_json=text)
    )
    given = {"operation": "gemm", "config_json": text}
    for ask in (
        lambda: victim.dispatch.Plan(plan, timeout=60),
        lambda: victim.kernels.Validate(kp.ValidateConfigRequest(**given), timeout=60),
        lambda: victim.kernels.Correct(kp.CorrectConfigRequest(**given), timeout=60),
        lambda: victim.kernels.Register(kp.RegisterKernelRequest(session=victim.token, **given), timeout=60),
        lambda: list(victim.kernels.Build(kp.BuildRequest(session=victim.token, **given), timeout=60)),
    ):
        with pytest.raises(grpc.RpcError) as error:
            ask()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


CHEAP = [path for path in METHODS if "/tilewright.v1.Kernels/" in path and not path.endswith(("/Build", "/Export"))]


@pytest.mark.parametrize("path", [*CHEAP, "/tilewright.v1.Dispatch/Execute", "/tilewright.v1.Dispatch/Plan"])
@settings(SETTINGS, max_examples=12)
@given(data=st.data())
def test_hostile_requests_get_typed_errors(victim: Client, path: str, data: st.DataObject) -> None:
    tree = data.draw(messages(METHODS[path].input_type))
    if path.endswith("/List"):
        tree["limit"] = 1
    replies = send(victim, path, [request_of(path, tree)])
    if path.endswith("/Execute"):
        check_results(replies)


@settings(SETTINGS, max_examples=60)
@given(
    shapes=st.tuples(*[st.lists(DIMENSIONS, max_size=4)] * 2),
    strides=st.tuples(*[st.lists(DIMENSIONS, max_size=3)] * 2),
    dtypes=st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    offset=st.sampled_from([0, 4, 3, 65532, 2**63, 2**64 - 4]),
    attributes=st.dictionaries(
        st.sampled_from(["alpha", "beta", "split_k", "unary", "out_dtype", "groups", "activation", "m"]),
        st.sampled_from(
            [
                tp.Attribute(),
                tp.Attribute(integer=-1),
                tp.Attribute(integer=2**63 - 1),
                tp.Attribute(number=float("nan")),
                tp.Attribute(text="Gelu"),
                tp.Attribute(text="x" * 300),
                tp.Attribute(integers=tp.Attribute.Ints(values=[1] * 1000)),
            ]
        ),
        max_size=2,
    ),
)
def test_impossible_problems_get_typed_errors(
    victim: Client,
    shapes: tuple[list[int], ...],
    strides: tuple[list[int], ...],
    dtypes: tuple[int, ...],
    offset: int,
    attributes: dict[str, tp.Attribute],
) -> None:
    inputs = [
        tp.Operand(
            name=name,
            spec=tp.TensorSpec(dtype=dtype, shape=shape, strides=stride),  # type: ignore[arg-type]
            location=in_region(Known.region, offset),
        )
        for name, shape, stride, dtype in zip("ab", shapes, strides, dtypes, strict=True)
    ]
    request = dp.RunRequest(session=victim.token, operation="gemm", inputs=inputs, attributes=attributes)
    send(victim, "/tilewright.v1.Dispatch/Run", [request.SerializeToString()])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-45])
def test_extreme_values_are_only_numbers(victim: Client, value: float) -> None:
    data = np.full((8, 8), value, np.float32).tobytes()
    inputs = [tp.Operand(name=name, spec=floats(8, 8), location=inline(data)) for name in "ab"]
    output = victim.dispatch.Run(dp.RunRequest(operation="gemm", inputs=inputs)).outputs[0]
    with np.errstate(all="ignore"):
        expected = np.full((8, 8), np.float32(value) * np.float32(value) * 8, np.float32)
    np.testing.assert_array_equal(np.frombuffer(output.inline, np.float32).reshape(8, 8), expected)


def test_the_server_is_as_good_as_new(victim: Client) -> None:
    inputs = [tp.Operand(name=name, spec=floats(2, 2), location=inline(bytes(16))) for name in "ab"]
    assert victim.dispatch.Run(dp.RunRequest(operation="gemm", inputs=inputs)).outputs[0].inline == bytes(16)
    assert victim.kernels.Statistics(kp.StatisticsRequest()).queue_depth == 0
    assert all(item.in_use == 0 for item in victim.status().regions)
