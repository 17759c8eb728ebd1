"""Every call of Triton's Python examples, by Triton's own client as PyPI has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
import tritonclient.utils.shared_memory as shm  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

import tilewright as tw  # noqa: E402

MODEL = "tilewright.gemm"
A = (np.arange(12, dtype=np.float32).reshape(3, 4) - 5) / 4
B = (np.arange(20, dtype=np.float32).reshape(4, 5) - 9) / 8


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with contextlib.closing(triton.InferenceServerClient(address)) as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def inputs(a: np.ndarray = A, b: np.ndarray = B, datatype: str = "FP32") -> list[Any]:
    return [tensor("a", a, datatype), tensor("b", b, datatype)]


def config(**parameters: object) -> str:
    shapes = [{"name": "a", "data_type": "TYPE_FP32", "dims": [3, 4]}]
    shapes += [{"name": "b", "data_type": "TYPE_FP32", "dims": ["4", "5"]}]
    values = {name: {"string_value": str(value)} for name, value in parameters.items()}
    return json.dumps({"input": shapes, "parameters": values})


# Health and metadata


@pytest.mark.extended
def test_the_server_says_that_it_lives_and_what_it_can_do(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert not client.is_model_ready("tilewright.no_such")
    found = client.get_server_metadata(as_json=True)
    assert found["name"] == "tilewright"
    assert {"system_shared_memory", "cuda_shared_memory", "statistics"} <= set(found["extensions"])


def test_a_model_describes_its_tensors_with_sizes_that_requests_choose(client: Any) -> None:
    found = client.get_model_metadata(MODEL)
    assert [(item.name, item.datatype, list(item.shape)) for item in found.inputs] == [
        ("a", "FP32", [-1, -1]), ("b", "FP32", [-1, -1]),
    ]  # fmt: skip
    assert [(item.name, item.datatype) for item in found.outputs] == [("out", "FP32")]
    made = client.get_model_config(MODEL).config
    assert made.name == MODEL and made.max_batch_size == 0 and [item.name for item in made.input] == ["a", "b"]
    assert not made.model_transaction_policy.decoupled


def test_the_index_lists_operations_and_none_that_the_protocol_cannot_describe(client: Any) -> None:
    found = {item.name: item.state for item in client.get_model_repository_index().models}
    assert found[MODEL] == "READY" and "tilewright.gemm_pack_b" not in found


@pytest.mark.parametrize("version", ["", "1"])
def test_there_is_one_version(client: Any, version: str) -> None:
    assert client.infer(MODEL, inputs(), model_version=version).get_response().model_version == "1"
    with pytest.raises(InferenceServerException, match="version"):
        client.infer(MODEL, inputs(), model_version="2")


# Inference


def test_a_product_is_right_and_the_id_comes_back(client: Any) -> None:
    result = client.infer(MODEL, inputs(), request_id="seven")
    np.testing.assert_allclose(result.as_numpy("out"), A @ B, rtol=1e-6)
    assert result.get_response().id == "seven"


def test_attributes_come_as_parameters_with_outputs_asked_for_by_name(client: Any) -> None:
    result = client.infer(
        MODEL,
        inputs(),
        outputs=[triton.InferRequestedOutput("out")],
        parameters={"alpha": 0.5, "unary": "Relu"},
        priority=1,
        timeout=240_000_000,
        client_timeout=300,
    )
    np.testing.assert_allclose(result.as_numpy("out"), np.maximum(0.5 * (A @ B), 0), rtol=1e-6)


def test_bf16_is_exact(client: Any) -> None:
    a, b = A.astype(ml_dtypes.bfloat16), B.astype(ml_dtypes.bfloat16)
    result = client.infer(MODEL, inputs(a, b, "BF16"), parameters={"out_dtype": "fp32"}).as_numpy("out")
    np.testing.assert_allclose(result, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-6)


@pytest.mark.extended
def test_fp16_and_int8_come_in_their_own_datatypes(client: Any) -> None:
    half = client.infer(MODEL, inputs(A.astype(np.float16), B.astype(np.float16), "FP16"))
    assert half.get_output("out").datatype == "FP16"
    np.testing.assert_allclose(half.as_numpy("out"), A @ B, rtol=2e-3, atol=2e-3)
    a, b = np.arange(-6, 6, dtype=np.int8).reshape(3, 4), np.arange(-10, 10, dtype=np.int8).reshape(4, 5)
    whole = client.infer(MODEL, inputs(a, b, "INT8")).as_numpy("out")
    np.testing.assert_array_equal(whole, a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.extended
@pytest.mark.parametrize(("name", "dtype"), [("fp8", ml_dtypes.float8_e4m3fn), ("bf8", ml_dtypes.float8_e5m2)])
def test_8_bit_floats_come_as_uint8_with_a_parameter(client: Any, name: str, dtype: Any) -> None:
    a, b = A.astype(dtype), B.astype(dtype)
    result = client.infer(
        MODEL,
        inputs(a.view(np.uint8), b.view(np.uint8), "UINT8"),
        parameters={"dtype.a": name, "dtype.b": name, "out_dtype": "fp32"},
    )
    np.testing.assert_allclose(result.as_numpy("out"), a.astype(np.float32) @ b.astype(np.float32), rtol=1e-5)
    with pytest.raises(InferenceServerException, match=r"dtype\.a"):
        client.infer(MODEL, inputs(a.view(np.uint8), b.view(np.uint8), "UINT8"))


def test_typed_contents_do_as_well_as_raw_ones(client: Any, address: str) -> None:
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, array in (("a", A), ("b", B)):
        added = request.inputs.add(name=name, datatype="FP32", shape=array.shape)
        added.contents.fp32_contents.extend(array.ravel())
    import grpc

    with grpc.insecure_channel(address) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    np.testing.assert_allclose(np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(3, 5), A @ B, rtol=1e-6)


def test_asynchronous_requests_are_answered(client: Any) -> None:
    results: queue.Queue[Any] = queue.Queue()
    for number in range(8):
        client.async_infer(MODEL, inputs(), lambda result, error: results.put((result, error)), request_id=str(number))
    found = [results.get(timeout=60) for _ in range(8)]
    assert all(error is None for _, error in found)
    assert sorted(result.get_response().id for result, _ in found) == sorted(map(str, range(8)))


def test_a_stream_answers_each_request_and_goes_on_after_an_error(client: Any) -> None:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer(MODEL, inputs(), request_id="1", enable_empty_final_response=True)
    client.async_stream_infer("tilewright.no_such", inputs(), request_id="2")
    client.async_stream_infer(MODEL, inputs(), request_id="3", sequence_id=5, sequence_start=True)
    found = [results.get(timeout=60) for _ in range(3)]
    client.stop_stream()
    assert found[0][0].get_response().parameters["triton_final_response"].bool_param
    np.testing.assert_allclose(found[0][0].as_numpy("out"), A @ B, rtol=1e-6)
    assert found[1][0] is None and "no such model" in str(found[1][1])
    assert found[2][0].get_response().id == "3"


def test_the_asyncio_client_is_answered(address: str) -> None:
    import tritonclient.grpc.aio as triton_aio

    async def run() -> np.ndarray:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            many = await asyncio.gather(*(client.infer(MODEL, inputs()) for _ in range(4)))
            return many[-1].as_numpy("out")

    np.testing.assert_allclose(asyncio.run(run()), A @ B, rtol=1e-6)


def test_the_asyncio_client_streams(address: str) -> None:
    import tritonclient.grpc.aio as triton_aio

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(3):
            yield {"model_name": MODEL, "inputs": inputs(A * number), "request_id": str(number)}

    async def run() -> list[tuple[str, Any, Any]]:
        found = []
        async with triton_aio.InferenceServerClient(address) as client:
            async for result, error in client.stream_infer(requests()):
                found.append((result.get_response().id, result.as_numpy("out"), error))
        return found

    found = asyncio.run(run())
    assert len(found) == 3
    for number, (name, out, error) in enumerate(found):
        assert (name, error) == (str(number), None)
        np.testing.assert_allclose(out, A * number @ B, rtol=1e-6)


def test_options_of_its_connections_and_requests_do_as_they_do_with_triton(address: str) -> None:
    """Keep-alive, arguments of the channel, a plugin that adds headers, compression, and inputs that are used again."""

    class Plugin(triton.InferenceServerClientPlugin):
        seen = 0

        def __call__(self, request: Any) -> None:
            self.seen += 1
            request.headers["x-request-id"] = "from-a-plugin"

    alive = triton.KeepAliveOptions(keepalive_time_ms=1000, keepalive_permit_without_calls=True)
    arguments = [("grpc.max_receive_message_length", 1 << 20), ("grpc.use_local_subchannel_pool", 1)]
    plugin, given = Plugin(), inputs()
    outputs = [triton.InferRequestedOutput("out")]
    for options in ({"keepalive_options": alive}, {"channel_args": arguments}):
        with contextlib.closing(triton.InferenceServerClient(address, **options)) as client:
            client.register_plugin(plugin)
            for way in (None, "gzip", "deflate"):
                result = client.infer(MODEL, given, outputs=outputs, compression_algorithm=way, client_timeout=60)
                np.testing.assert_allclose(result.as_numpy("out"), A @ B, rtol=1e-6)
            given[0].set_data_from_numpy(2 * A)
            np.testing.assert_allclose(client.infer(MODEL, given).as_numpy("out"), 2 * A @ B, rtol=1e-6)
            given[0].set_data_from_numpy(A)
    assert plugin.seen == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_name": "no_such"}, "no such model"),
        ({"inputs": [tensor("a", A)]}, "b is missing"),
        ({"inputs": [*inputs(), tensor("zzz", A)]}, "zzz"),
        ({"inputs": [tensor("a", A), tensor("a", A)]}, "twice"),
        ({"inputs": inputs(A, B[:3])}, "columns"),
        ({"outputs": [triton.InferRequestedOutput("nothing")]}, "nothing"),
        ({"outputs": [triton.InferRequestedOutput("out", class_count=2)]}, "classified"),
        ({"parameters": {"alpa": 1.0}}, "alpha"),
        ({"parameters": {"unary": "[1, {}]"}}, "list"),
        ({"parameters": {"tilewright_kernel": "none_such"}}, "none_such"),
    ],
)
def test_mistakes_are_errors_that_say_what_to_do(client: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InferenceServerException, match=said):
        client.infer(**({"model_name": MODEL, "inputs": inputs()} | change))


def test_bytes_are_refused_by_their_datatype(client: Any) -> None:
    text = tensor("a", np.array([["x"]], dtype=object), "BYTES")
    with pytest.raises(InferenceServerException, match="datatype"):
        client.infer(MODEL, [text, tensor("b", B)])


# Statistics and settings


def test_statistics_grow_with_requests(client: Any) -> None:
    def now() -> Any:
        return client.get_inference_statistics(MODEL).model_stats[0]

    before = now()
    client.infer(MODEL, inputs())
    after = now()
    assert after.version == "1"
    assert after.inference_stats.queue.count == before.inference_stats.queue.count + 1
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    with contextlib.suppress(InferenceServerException):
        client.infer(MODEL, [tensor("a", A)])
    assert now().inference_stats.fail.count == before.inference_stats.fail.count + 1
    assert len(client.get_inference_statistics().model_stats) >= 1


def test_settings_are_read_and_not_changed(client: Any) -> None:
    assert client.get_log_settings(as_json=True)["settings"]["log_error"]["bool_param"]
    assert client.get_trace_settings(as_json=True)["settings"]["trace_level"]["value"] == ["OFF"]
    with pytest.raises(InferenceServerException, match="cannot change"):
        client.update_log_settings({"log_info": False})
    with pytest.raises(InferenceServerException, match="cannot change"):
        client.update_trace_settings(settings={"trace_level": "TIMESTAMPS"})


# Plans


def test_a_plan_is_loaded_used_and_unloaded(client: Any) -> None:
    name = f"{MODEL}@mine"
    client.load_model(name, config=config(unary="Relu", alpha=2.0))
    assert client.is_model_ready(name)
    assert list(client.get_model_metadata(name).inputs[1].shape) == [4, 5]
    assert name in {item.name for item in client.get_model_repository_index().models}
    np.testing.assert_allclose(client.infer(name, inputs()).as_numpy("out"), np.maximum(2 * (A @ B), 0), rtol=1e-6)
    assert client.get_inference_statistics(name).model_stats[0].inference_count == 1
    with pytest.raises(InferenceServerException, match="not those that the plan is for"):
        client.infer(name, inputs(A[:2], B))
    with pytest.raises(InferenceServerException, match="prepared"):
        client.infer(name, inputs(), parameters={"alpha": 1.0})
    client.unload_model(name)
    assert not client.is_model_ready(name)


def test_a_plans_requests_are_not_planned_again(client: Any, tcp: str) -> None:
    name = f"{MODEL}@ready"
    client.load_model(name, config=config())
    with tw.connect(tcp, launch="server") as other:

        def asked() -> int:
            found = next(item for item in other.kernels.statistics()["operations"] if item["name"] == "gemm")
            return int(found["plan_hits"]) + int(found["plan_misses"])

        before = asked()
        for given in (inputs(), inputs()[::-1]):
            np.testing.assert_allclose(client.infer(name, given).as_numpy("out"), A @ B, rtol=1e-6)
        assert asked() == before
    client.unload_model(name)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"input": [{}]}', '{"input": [{"name": "a"}]}'])
def test_a_configuration_that_is_none_is_refused(client: Any, text: str) -> None:
    with pytest.raises(InferenceServerException, match="plan"):
        client.load_model(f"{MODEL}@bad", config=text or None)


def test_operations_load_and_are_not_unloaded(client: Any) -> None:
    client.load_model(MODEL)
    with pytest.raises(InferenceServerException, match="not unloaded"):
        client.unload_model(MODEL)


# Shared memory


class Shared:
    """Objects of shared memory, as Triton's example makes them."""

    def __init__(self, name: str) -> None:
        self.handles: list[Any] = []
        self.name = name

    def make(self, name: str, nbytes: int) -> Any:
        handle = shm.create_shared_memory_region(f"{self.name}_{name}", f"/{self.name}_{name}", nbytes)
        self.handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self.handles:
            shm.destroy_shared_memory_region(handle)


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    import os

    made = Shared(f"kserve_test_{os.getpid()}_{threading.get_ident()}")
    yield made
    made.close()


def register_product(client: Any, shared: Shared) -> tuple[list[Any], list[Any], Any]:
    """Both inputs in one region, the output in another that nobody has touched."""
    source, target = shared.make("in", A.nbytes + B.nbytes), shared.make("out", 100)
    shm.set_shared_memory_region(source, [A, B])
    client.register_system_shared_memory("in", f"/{shared.name}_in", A.nbytes + B.nbytes)
    client.register_system_shared_memory("out", f"/{shared.name}_out", 100)
    a, b = triton.InferInput("a", A.shape, "FP32"), triton.InferInput("b", B.shape, "FP32")
    a.set_shared_memory("in", A.nbytes)
    b.set_shared_memory("in", B.nbytes, offset=A.nbytes)
    out = triton.InferRequestedOutput("out")
    out.set_shared_memory("out", 60)
    return [a, b], [out], target


def test_system_shared_memory_is_used_listed_and_given_back(client: Any, shared: Shared) -> None:
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    given, wanted, target = register_product(client, shared)
    result = client.infer(MODEL, given, outputs=wanted)
    assert list(result.get_response().raw_output_contents) == [b""]  # C++ clients index it unchecked
    found = shm.get_contents_as_numpy(target, np.float32, [3, 5])
    np.testing.assert_allclose(found, A @ B, rtol=1e-6)
    status = client.get_system_shared_memory_status()
    assert {name: item.byte_size for name, item in status.regions.items()} == {"in": A.nbytes + B.nbytes, "out": 100}
    client.unregister_system_shared_memory("in")
    assert list(client.get_system_shared_memory_status().regions) == ["out"]
    with pytest.raises(InferenceServerException, match="no shared-memory region of that name"):
        client.infer(MODEL, given, outputs=wanted)
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions


def test_inputs_in_shared_memory_and_in_the_message_mix(client: Any, shared: Shared) -> None:
    given, _, _ = register_product(client, shared)
    for mixed in ([given[0], tensor("b", B)], [tensor("a", A), given[1]]):
        np.testing.assert_allclose(client.infer(MODEL, mixed).as_numpy("out"), A @ B, rtol=1e-6)
    client.unregister_system_shared_memory()
