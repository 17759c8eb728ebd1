"""The main job of attention: another process hands over queries, keys and values as they lie, and gets results and
gradients, by requests, by prepared plans, and from a cache that stays with the server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import conv_messages as cm
import numpy as np
import pytest
from rpc_harness import Client, MemoryFile, ServerProcess, in_buffer, in_region, inline, refused

from tilewright_fmha.references.append import reference_append
from tilewright_fmha.references.backward import reference_backward
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "fmha"]
PAGE = 4096
REFERENCES = {
    "attention": reference_attention,
    "attention_backward": reference_backward,
    "kv_append": reference_append,
}
SHAPES = {"q": (2, 4, 33, 32), "k": (2, 2, 50, 32), "v": (2, 2, 50, 24)}
OUT, LSE = (2, 4, 33, 24), (2, 4, 33)
WORDS: dict[str, Any] = {"mask": "bottom_right", "return_lse": True}
# A cache of eight pages of 16 tokens, three sequences of at most 48.
CACHE = {"k": (8, 16, 2, 32), "v": (8, 16, 2, 32)}
TABLE = np.array([[3, 0, 7], [5, 1, -1], [6, -1, -1]], np.int32)
LENGTHS = np.array([40, 17, 3], np.int32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("attention"), COMMAND, cache_dir=kernel_cache) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as made:
        yield made


def drawn(**shapes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def spec(array: np.ndarray[Any, Any]) -> tp.TensorSpec:
    return tp.TensorSpec(dtype=tp.INT32 if array.dtype == np.int32 else tp.FP32, shape=array.shape)


def sent(array: np.ndarray[Any, Any]) -> tp.Location:
    return inline(array.tobytes())


def operands(arrays: Mapping[str, np.ndarray[Any, Any]], places: Mapping[str, tp.Location] | None = None) -> Any:
    found = {name: sent(array) for name, array in arrays.items()} if places is None else places
    return [cm.operand(name, spec(array), found[name]) for name, array in arrays.items()]


def outputs(reply: dp.RunReply, **shapes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
    assert {item.name for item in reply.outputs} == set(shapes)
    return {item.name: np.frombuffer(item.inline, np.float32).reshape(shapes[item.name]) for item in reply.outputs}


def truth(operation: str, inputs: Mapping[str, Any], **words: Any) -> Mapping[str, Any]:
    """The right outputs in float64."""
    kinds = {name: "int32" if array.dtype == np.int32 else "fp32" for name, array in inputs.items()}
    descs = {name: TensorDesc.of(kinds[name], array.shape) for name, array in inputs.items()}
    problem = PARSERS[operation](OperationRequest(operation, descs, {}, words))
    return REFERENCES[operation](problem, inputs)


def near(have: Any, want: Any) -> None:
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


class Shared:
    """Tensors in one memory file of the session, each with poison around it."""

    def __init__(self, client: Client, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        steps = {name: -(-(array.nbytes + PAGE) // PAGE) * PAGE for name, array in arrays.items()}
        self.file = MemoryFile(sum(steps.values()))
        self.whole = np.frombuffer(self.file.bytes, np.float32)
        self.whole[:] = np.nan
        self.region = client.register(self.file).region
        self.arrays: dict[str, Any] = {}
        self.places: dict[str, tp.Location] = {}
        start = 0
        for name, array in arrays.items():
            self.arrays[name] = self.whole[start // 4 : start // 4 + array.size].view(array.dtype).reshape(array.shape)
            self.arrays[name][...] = array
            self.places[name] = in_region(self.region, start)
            start += steps[name]

    def operands(self, *names: str) -> Any:
        return operands({name: self.arrays[name] for name in names}, self.places)

    def close(self, client: Client) -> None:
        client.unregister(self.region)
        self.arrays.clear()
        del self.whole
        self.file.close()


@pytest.mark.extended
def test_attention_and_its_gradients_run_on_inline_tensors_and_are_planned_once(client: Client) -> None:
    arrays = drawn(**SHAPES)
    message = dp.RunRequest(operation="attention", attributes=cm.attributes(**WORDS), inputs=operands(arrays))
    reply = client.dispatch.Run(message)
    found, want = outputs(reply, o=OUT, lse=LSE), truth("attention", arrays, **WORDS)
    near(found["o"], want["o"])
    near(found["lse"], want["lse"])
    assert reply.report.kernels
    again = client.dispatch.Run(message)
    assert again.report.plan_cached
    assert again.report.timing.build_ns == 0
    assert [item.inline for item in again.outputs] == [item.inline for item in reply.outputs]
    saved = arrays | found | drawn(do=OUT)
    words = {"mask": WORDS["mask"]}
    message = dp.RunRequest(operation="attention_backward", attributes=cm.attributes(**words), inputs=operands(saved))
    gradients = outputs(client.dispatch.Run(message), dq=SHAPES["q"], dk=SHAPES["k"], dv=SHAPES["v"])
    for name, exact in truth("attention_backward", saved, **words).items():
        near(gradients[name], exact)


def test_tensors_in_shared_memory_are_never_copied_and_nothing_else_is_written(client: Client) -> None:
    blank = {"o": np.zeros(OUT, np.float32), "lse": np.zeros(LSE, np.float32)}
    shared = Shared(client, drawn(**SHAPES) | blank)
    want = truth("attention", {name: shared.arrays[name] for name in SHAPES}, **WORDS)
    for name in blank:
        shared.arrays[name][...] = np.nan
    before = np.isnan(shared.whole)
    message = dp.RunRequest(
        session=client.token, operation="attention", inputs=shared.operands(*SHAPES), outputs=shared.operands(*blank),
        attributes=cm.attributes(**WORDS),
    )  # fmt: skip
    assert client.dispatch.Run(message).report.bytes_copied == 0
    for name in blank:
        near(shared.arrays[name], want[name])
    written = int(before.sum() - np.isnan(shared.whole).sum())
    assert written == prod(OUT) + prod(LSE), "poison around the tensors was written over"
    shared.close(client)


def test_a_prepared_plan_serves_all_lengths_alone_and_in_batches(client: Client) -> None:
    arrays = drawn(q=(3, 4, 1, 32), **CACHE) | {"block_table": TABLE, "seqlens_k": LENGTHS.copy()}
    shared = Shared(client, arrays | {"o": np.zeros((3, 4, 1, 32), np.float32)})
    described = [cm.operand(name, spec(array)) for name, array in arrays.items()]
    plan = client.dispatch.Plan(dp.PlanRequest(session=client.token, operation="attention", inputs=described))
    names = [item.name for item in (*plan.inputs, *plan.outputs)]
    assert set(names) == {*arrays, "o"}
    execution = dp.Execution(plan=plan.plan, locations=[shared.places[name] for name in names])
    message = dp.ExecuteRequest(session=client.token, executions=[execution])
    for lengths in (LENGTHS, LENGTHS - 3, LENGTHS * 0):
        shared.arrays["seqlens_k"][...] = lengths
        want = truth("attention", {name: shared.arrays[name] for name in arrays})["o"]
        for send in (
            lambda: client.dispatch.Execute(message),
            lambda: list(client.dispatch.ExecuteStream(iter([message] * 5)))[-1],
            lambda: client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution] * 16)),
        ):
            shared.arrays["o"][...] = np.nan
            assert not any(result.HasField("error") for result in send().results)
            near(shared.arrays["o"], want)
    shared.arrays["seqlens_k"][...] = LENGTHS
    shared.arrays["block_table"][0, 1] = 8
    failed = client.dispatch.Execute(message).results[0].error
    assert (failed.code, failed.rule) == ("invalid_argument", "block_table_range"), failed
    shared.close(client)


def test_a_cache_stays_with_the_server_while_rows_are_appended_and_read(client: Client) -> None:
    kept = drawn(k_cache=CACHE["k"], v_cache=CACHE["v"])
    places = {}
    for name, array in kept.items():
        buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=array.nbytes)).buffer
        client.memory.WriteBuffer(mp.WriteBufferRequest(session=client.token, buffer=buffer, data=array.tobytes()))
        places[name] = in_buffer(buffer)
    table, lengths = TABLE.copy(), LENGTHS.copy()
    table[table < 0] = [2, 4, 2]  # no sequence gets so far
    for step in range(3):
        rng = np.random.default_rng(step)
        new = {name: rng.standard_normal((3, 2, 1, 32)).astype(np.float32) for name in ("k_new", "v_new")}
        past = {"k_past": kept["k_cache"], "v_past": kept["v_cache"]}
        of_table = {"block_table": table, "seqlens_k": lengths}
        inputs = operands(new | of_table)
        inputs += [cm.operand(f"{x}_past", spec(kept[f"{x}_cache"]), places[f"{x}_cache"]) for x in "kv"]
        message = dp.RunRequest(
            session=client.token, operation="kv_append", inputs=inputs,
            outputs=[cm.operand(name, spec(array), places[name]) for name, array in kept.items()],
        )  # fmt: skip
        assert not client.dispatch.Run(message).outputs, "the cache is where it was"
        grown = truth("kv_append", new | past | of_table)
        kept = {name: np.asarray(grown[name], np.float32) for name in kept}
        lengths = lengths + 1
        q = rng.standard_normal((3, 4, 1, 32)).astype(np.float32)
        given = {"q": q, "block_table": table, "seqlens_k": lengths}
        inputs = operands(given) + [cm.operand(x, spec(kept[f"{x}_cache"]), places[f"{x}_cache"]) for x in "kv"]
        reply = client.dispatch.Run(dp.RunRequest(session=client.token, operation="attention", inputs=inputs))
        want = truth("attention", given | {x: kept[f"{x}_cache"] for x in "kv"})
        near(outputs(reply, o=(3, 4, 1, 32))["o"], want["o"])
    for place in places.values():
        client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=place.buffer.buffer))


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"k": (2, 3, 50, 32), "v": (2, 3, 50, 24)}, "head_groups"),
        ({"q": (2, 4, 33, 40)}, "head_dims_agree"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_rule(
    client: Client, changes: dict[str, tuple[int, ...]], rule: str
) -> None:
    message = dp.RunRequest(operation="attention", inputs=operands(drawn(**SHAPES | changes)))
    with refused("invalid_argument", rule) as found:
        client.dispatch.Run(message)
    assert found[0].field
    assert found[0].fix


@pytest.mark.extended
def test_kernels_of_attention_are_listed_described_and_explained(client: Client) -> None:
    listed = client.kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(operation="attention"), limit=3))
    assert listed.total
    described = client.kernels.Describe(
        kp.DescribeKernelRequest(operation="attention", name=listed.kernels[0].name, source=True)
    )
    assert "#include" in described.source
    inputs = [cm.operand(name, spec(array)) for name, array in drawn(**SHAPES).items()]
    explained = client.kernels.Explain(kp.ExplainRequest(operation="attention", inputs=inputs))
    assert "candidates" in explained.json
