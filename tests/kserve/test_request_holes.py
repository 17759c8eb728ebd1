"""Holes that servers of this protocol have had in the reading of requests, each closed: numbers that wrap, texts that
nest, names that are paths, files that come along, streams that are cancelled, more outputs than there are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rpc_harness import ServerProcess

from tilewright_proto.inference import inference_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
A = np.ones((4, 4), np.float32)
INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DEEP = "[" * 100_000


def infer(shape: tuple[int, ...] = (4, 4), **parameters: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[A.tobytes()] * 2)
    for name in ("a", "b"):
        request.inputs.add(name=name, datatype="FP32", shape=shape)
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def load(name: str, config: str = "", **parameters: Any) -> pb.RepositoryModelLoadRequest:
    request = pb.RepositoryModelLoadRequest(model_name=name)
    if config:
        request.parameters["config"].string_param = config
    for key, value in parameters.items():
        request.parameters[key].bytes_param = value
    return request


class Client:
    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)

    def call(self, request: Any) -> Any:
        name = type(request).__name__.removesuffix("Request")
        reply = getattr(pb, f"{name}Response")
        return self.channel.unary_unary(SERVICE + name, type(request).SerializeToString, reply.FromString)(
            request, timeout=60
        )

    def refused(self, request: Any, *codes: grpc.StatusCode) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(request)
        assert caught.value.code() in codes, caught.value
        return str(caught.value.details())


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """One whose server goes on and multiplies after the test as before."""
    made = Client(address)
    yield made
    assert made.call(infer()).raw_output_contents == [(A @ A).tobytes()]
    made.channel.close()


@pytest.mark.parametrize(
    "shape",
    [(2**32, 2**32), (2**62, 4), (2**63 - 1, 2), (2**61 + 1, 8), (-4, -4), (-(2**63), 2), (2**20, 2**20), (1,) * 5000],
    ids=str,
)
def test_sizes_that_wrap_or_exceed_the_data_are_refused(
    client: Client, server: ServerProcess, shape: tuple[int, ...]
) -> None:
    before = server.rss_mib()
    client.refused(infer(shape), INVALID)
    assert server.rss_mib() < before + 64, "nothing of that size was made"


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0)], ids=str)
def test_sizes_of_zero_divide_nothing(client: Client, shape: tuple[int, ...]) -> None:
    request = infer(shape)
    request.raw_input_contents[:] = [b"", b""]
    try:
        assert client.call(request).outputs[0].shape[:] in ([shape[0], shape[1]], [0, 0], [4, 4])
    except grpc.RpcError as error:
        assert error.code() == INVALID, error


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: load("tilewright.gemm@deep", DEEP),
        lambda: load("tilewright.gemm@deep", '{"input": ' + DEEP),
        lambda: load("tilewright.gemm@deep", json.dumps({"input": [], "parameters": {"a": {"string_value": DEEP}}})),
        lambda: infer(activation=DEEP),
        lambda: infer(stride=DEEP),
        lambda: infer(activation='["\\ud800"]'),
        lambda: infer(stride='["\\udfff"]'),
        lambda: load(
            "tilewright.gemm@half", json.dumps({"input": [], "parameters": {"a": {"string_value": "\ud800"}}})
        ),
    ],
)
def test_texts_that_nest_or_cannot_be_written_are_refused(client: Client, request_of: Any) -> None:
    client.refused(request_of(), INVALID)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "tilewright.gemm/../x", "a\nb", "$(id)", ";id", "x" * 100_000, "", "@"]
)
def test_names_of_models_are_no_paths_and_no_commands(client: Client, name: str) -> None:
    for request in (load(name), pb.RepositoryModelUnloadRequest(model_name=name), pb.ModelConfigRequest(name=name)):
        assert len(client.refused(request, INVALID, MISSING)) < 1000


def test_files_that_come_with_a_model_are_refused(client: Client, server: ServerProcess, tmp_path: Path) -> None:
    """Triton takes files of a model from such parameters, and had to keep them in their folder."""
    target = tmp_path / "written"
    config = json.dumps({"input": [{"name": name, "data_type": "TYPE_FP32", "dims": [4, 4]} for name in ("a", "b")]})
    for name in ("tilewright.gemm", "tilewright.gemm@files"):
        request = load(name, config if "@" in name else "", **{f"file:{target}": b"x", "file:../../written": b"x"})
        assert "file:" in client.refused(request, INVALID)
    assert not target.exists()


@pytest.mark.parametrize("count", [2, 1000, 100_000])
def test_more_outputs_than_there_are_are_refused(client: Client, server: ServerProcess, count: int) -> None:
    request, before = infer(), server.rss_mib()
    for number in range(count):
        request.outputs.add(name="out" if number % 2 else f"out{number}")
    client.refused(request, INVALID)
    request = infer()
    for _ in range(count):
        request.outputs.add(name="out")
    client.refused(request, INVALID)
    assert server.rss_mib() < before + 128


def test_streams_that_are_cancelled_under_way_are_over(client: Client, server: ServerProcess) -> None:
    def requests() -> Iterator[bytes]:
        while True:
            yield infer().SerializeToString()

    way = client.channel.stream_stream(SERVICE + "ModelStreamInfer")
    for number in range(30):
        call = way(requests(), timeout=60)
        for _ in range(number % 3):
            next(call)
        call.cancel()
    time.sleep(0.05)
    assert "Traceback" not in server.log()
