"""Requests made from what ``DescribeOperation`` says alone: a client knows nothing else of operations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rpc_harness import Client, ServerProcess, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import operations_pb2 as op
from tilewright_proto.v1 import tensor_pb2 as tp

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "gemm", "grouped_conv", "fmha"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Client]:
    with ServerProcess(tmp_path_factory.mktemp("described"), COMMAND, cache_dir=kernel_cache) as process:
        assert process.ready, process.log()
        with Client(process.addresses[0]) as made:
            yield made


@pytest.fixture(scope="module")
def described(client: Client) -> dict[str, op.OperationDescription]:
    reply = client.dispatch.DescribeOperation(op.DescribeOperationRequest())
    return {item.name: item for item in reply.operations}


def test_every_operation_is_described_with_examples(described: dict[str, op.OperationDescription]) -> None:
    assert {"gemm", "conv", "attention", "kv_append"} <= set(described)
    for name, item in described.items():
        assert item.declared and item.version and item.inputs and item.outputs and item.examples, name
        for attribute in item.attributes:
            assert attribute.types and (attribute.HasField("default") or attribute.absent), attribute


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["one", "others"])
def test_an_example_of_every_operation_has_a_kernel(
    client: Client, described: dict[str, op.OperationDescription], rest: bool
) -> None:
    names = [name for name in described if (name != "gemm_pack_b") == rest]
    assert names
    for name in names:
        example = described[name].examples[0]
        request = kp.ExplainRequest(
            operation=name, inputs=example.inputs, outputs=example.outputs, attributes=example.attributes
        )
        assert json.loads(client.kernels.Explain(request).json)["candidates"], name


def test_an_example_runs_with_numbers_of_its_shapes(
    client: Client, described: dict[str, op.OperationDescription]
) -> None:
    example = described["gemm"].examples[0]
    arrays = {item.name: np.ones(tuple(item.spec.shape), np.float32) for item in example.inputs}
    inputs = [
        tp.Operand(name=item.name, spec=item.spec, location=tp.Location(inline=arrays[item.name].tobytes()))
        for item in example.inputs
    ]
    reply = client.dispatch.Run(dp.RunRequest(operation="gemm", inputs=inputs, attributes=example.attributes))
    out = np.frombuffer(reply.outputs[0].inline, np.float32)
    assert (out == arrays["a"].shape[1]).all()


def test_an_operation_that_there_is_not_is_an_error(client: Client) -> None:
    with refused("not_found", "operation_name") as found:
        client.dispatch.DescribeOperation(op.DescribeOperationRequest(operation="gem"))
    assert "gemm" in found[0].fix
