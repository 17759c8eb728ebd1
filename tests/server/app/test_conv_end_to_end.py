"""The main job of convolution: another process hands over images and weights as they lie, and gets the result and both
gradients, by requests, prepared plans, resident weights and in place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import conv_messages as cm
import numpy as np
import pytest
from rpc_harness import Client, MemoryFile, ServerProcess, in_buffer, in_region, inline, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "grouped_conv"]
PAGE = 4096
X, W, Y = (2, 6, 9, 7), (10, 3, 3, 3), (2, 10, 9, 7)
WORDS: dict[str, Any] = {"padding": 1, "groups": 2}
CALLS: dict[str, Any] = {
    "conv": ({"x": X, "w": W}, Y, WORDS),
    "conv_backward_data": ({"dy": Y, "w": W}, X, WORDS | {"input_size": X[2:]}),
    "conv_backward_weight": ({"x": X, "dy": Y}, W, WORDS | {"filter_size": W[2:]}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("conv"), COMMAND, cache_dir=kernel_cache) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as made:
        yield made


class Shared:
    """Tensors in one memory file of the session, channels last, each with poison around it."""

    def __init__(self, client: Client, shapes: dict[str, Any]) -> None:
        steps = {name: -(-(4 * prod(shape) + PAGE) // PAGE) * PAGE for name, shape in shapes.items()}
        self.file = MemoryFile(sum(steps.values()))
        self.whole = np.frombuffer(self.file.bytes, np.float32)
        self.whole[:] = np.nan
        self.region = client.register(self.file).region
        self.arrays: dict[str, Any] = {}
        self.places: dict[str, tp.Location] = {}
        start = 0
        for seed, (name, shape) in enumerate(shapes.items()):
            values = self.whole[start // 4 : start // 4 + prod(shape)]
            values[:] = np.random.default_rng(seed).standard_normal(len(values))
            self.arrays[name] = cm.placed(values, shape)
            self.places[name] = in_region(self.region, start)
            start += steps[name]

    def operands(self, *names: str) -> list[tp.Operand]:
        return [cm.operand(name, cm.spec(*self.arrays[name].shape), self.places[name]) for name in names]

    def close(self, client: Client) -> None:
        client.unregister(self.region)
        self.arrays.clear()
        del self.whole
        self.file.close()


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("operation", CALLS)
def test_every_direction_runs_on_inline_tensors_and_is_planned_once(client: Client, operation: str, last: bool) -> None:
    shapes, shape, words = CALLS[operation]
    inputs = {name: cm.memory(item, seed, last=last) for seed, (name, item) in enumerate(shapes.items())}
    message = dp.RunRequest(operation=operation, attributes=cm.attributes(**words))
    for name, array in inputs.items():
        message.inputs.append(cm.operand(name, cm.spec(*array.shape, last=last), inline(cm.flat(array))))
    reply = client.dispatch.Run(message)
    (output,) = reply.outputs
    assert output.name == cm.OUTPUTS[operation]
    found = np.frombuffer(output.inline, np.float32).reshape(shape)
    np.testing.assert_allclose(found, cm.truth(operation, inputs, **words), rtol=1e-4, atol=1e-4)
    assert reply.report.kernels
    again = client.dispatch.Run(message)
    assert again.report.plan_cached
    assert again.report.timing.build_ns == 0
    assert again.outputs[0].inline == output.inline


@pytest.mark.parametrize("operation", CALLS)
def test_channels_last_tensors_in_shared_memory_are_never_copied(client: Client, operation: str) -> None:
    shapes, shape, words = CALLS[operation]
    name = cm.OUTPUTS[operation]
    shared = Shared(client, {**shapes, name: shape})
    want = cm.truth(operation, {item: shared.arrays[item] for item in shapes}, **words)
    shared.arrays[name][...] = np.nan
    before = np.isnan(shared.whole)
    message = dp.RunRequest(
        session=client.token, operation=operation, inputs=shared.operands(*shapes), outputs=shared.operands(name),
        attributes=cm.attributes(**words),
    )  # fmt: skip
    reply = client.dispatch.Run(message)
    assert reply.report.bytes_copied == 0
    np.testing.assert_allclose(shared.arrays[name], want, rtol=1e-4, atol=1e-4)
    assert int(before.sum() - np.isnan(shared.whole).sum()) == prod(shape), "poison around the tensors was written over"
    shared.close(client)


@pytest.mark.parametrize("operation", CALLS)
def test_a_prepared_plan_runs_alone_in_batches_and_on_a_stream(client: Client, operation: str) -> None:
    shapes, shape, words = CALLS[operation]
    name = cm.OUTPUTS[operation]
    shared = Shared(client, {**shapes, name: shape})
    described = [cm.operand(item, cm.spec(*size)) for item, size in shapes.items()]
    plan = client.dispatch.Plan(
        dp.PlanRequest(session=client.token, operation=operation, inputs=described, attributes=cm.attributes(**words))
    )
    assert [item.name for item in (*plan.inputs, *plan.outputs)] == [*shapes, name]
    assert tuple(plan.outputs[0].spec.strides) == cm.last_strides(shape), "the output lies as the first input"
    assert plan.flops == 2 * prod(Y) * W[1] * prod(W[2:])
    assert json.loads(plan.json)["stages"]
    execution = dp.Execution(plan=plan.plan, locations=[shared.places[item] for item in (*shapes, name)])
    message = dp.ExecuteRequest(session=client.token, executions=[execution])
    want = cm.truth(operation, {item: shared.arrays[item] for item in shapes}, **words)
    results = []
    for send in (
        lambda: client.dispatch.Execute(message),
        lambda: list(client.dispatch.ExecuteStream(iter([message] * 5)))[-1],
        lambda: client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution] * 16)),
    ):
        shared.arrays[name][...] = np.nan
        reply = send()
        assert not any(result.HasField("error") for result in reply.results)
        np.testing.assert_allclose(shared.arrays[name], want, rtol=1e-4, atol=1e-4)
        results.append(shared.arrays[name].copy())
    assert all(np.array_equal(results[0], other) for other in results[1:]), "equal calls have equal results"
    shared.close(client)


@pytest.mark.parametrize("operation", ["conv_backward_data", "conv_backward_weight"])
def test_a_gradient_is_added_to_the_one_in_its_own_memory(client: Client, operation: str) -> None:
    shapes, shape, words = CALLS[operation]
    name = cm.OUTPUTS[operation]
    shared = Shared(client, {**shapes, name: shape})
    old = shared.arrays[name].copy()
    once = cm.truth(operation, {item: shared.arrays[item] for item in shapes}, **words)
    (target,) = shared.operands(name)
    acc = cm.operand("acc", target.spec, target.location)
    message = dp.RunRequest(
        session=client.token, operation=operation, inputs=[*shared.operands(*shapes), acc], outputs=[target],
        attributes=cm.attributes(**words, accumulate=True),
    )  # fmt: skip
    for times in (1, 2, 3):
        assert client.dispatch.Run(message).report.bytes_copied == 0
        np.testing.assert_allclose(shared.arrays[name], old + times * once, rtol=1e-3, atol=1e-3)
    message.inputs[0].location.region.offset = shared.places[name].region.offset
    with refused("invalid_argument", "operand_overlap"):  # any other input must not be the output
        client.dispatch.Run(message)
    shared.close(client)


def test_weights_stay_with_the_server_between_calls(client: Client) -> None:
    x, w = cm.memory(X, 1), cm.memory(W, 2)
    buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=w.nbytes)).buffer
    client.memory.WriteBuffer(mp.WriteBufferRequest(session=client.token, buffer=buffer, data=cm.flat(w)))
    weights = cm.operand("w", cm.spec(*W), in_buffer(buffer))
    for seed in range(3):
        x = cm.memory(X, seed)
        image = cm.operand("x", cm.spec(*X), inline(cm.flat(x)))
        message = dp.RunRequest(
            session=client.token, operation="conv", inputs=[image, weights], attributes=cm.attributes(**WORDS)
        )
        found = np.frombuffer(client.dispatch.Run(message).outputs[0].inline, np.float32).reshape(Y)
        np.testing.assert_allclose(found, cm.truth("conv", {"x": x, "w": w}, **WORDS), rtol=1e-4, atol=1e-4)
    client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=buffer))


def test_layouts_that_no_kernel_reads_are_transformed_and_the_reply_says_so(client: Client) -> None:
    x, w = cm.memory(X, 1), cm.memory(W, 2)
    odd = np.zeros((X[2], X[0], X[1], X[3]), np.float32).transpose(1, 2, 0, 3)  # rows first, then images
    odd[...] = x
    steps = tuple(step // 4 for step in odd.strides)
    image = cm.operand("x", tp.TensorSpec(dtype=tp.FP32, shape=X, strides=steps), inline(cm.flat(odd)))
    weights = cm.operand("w", cm.spec(*W), inline(cm.flat(w)))
    words = cm.attributes(**WORDS, layout="channels_last")
    message = dp.RunRequest(operation="conv", inputs=[image, weights], attributes=words)
    reply = client.dispatch.Run(message)
    found = np.frombuffer(reply.outputs[0].inline, np.float32).reshape(Y)
    np.testing.assert_allclose(found, cm.truth("conv", {"x": x, "w": w}, **WORDS), rtol=1e-4, atol=1e-4)
    assert any("x" in note for note in reply.report.notes), reply.report
    assert len(reply.report.kernels) > 1


def test_kernels_are_listed_described_validated_corrected_built_and_explained(client: Client) -> None:
    kernels = client.kernels
    for operation, (shapes, _, words) in CALLS.items():
        listed = kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(operation=operation), limit=3))
        assert listed.total
        one = listed.kernels[0]
        described = kernels.Describe(kp.DescribeKernelRequest(operation=operation, name=one.name, source=True))
        assert "#include" in described.source
        good = kernels.Validate(
            kp.ValidateConfigRequest(operation=operation, arch=one.arch, config_json=described.config_json)
        )
        assert good.valid
        assert good.name == one.name
        broken = json.dumps(json.loads(described.config_json) | {"ndim": 7})
        bad = kernels.Validate(kp.ValidateConfigRequest(operation=operation, arch=one.arch, config_json=broken))
        assert not bad.valid
        assert {item.rule for item in bad.violations} & {"ndim_range", "layout_matches_ndim"}
        mended = kernels.Correct(kp.CorrectConfigRequest(operation=operation, arch=one.arch, config_json=broken))
        assert mended.valid, mended.remaining
        document = json.loads(kernels.Export(kp.ExportRequest(filter=kp.KernelFilter(name=one.name))).json)
        assert document["kernels"][0]["name"] == one.name
        inputs = [cm.operand(name, cm.spec(*shape)) for name, shape in shapes.items()]
        asked = kp.ExplainRequest(operation=operation, inputs=inputs, attributes=cm.attributes(**words))
        explained = json.loads(kernels.Explain(asked).json)
        best = explained["candidates"][0]["kernel"]
        events = list(kernels.Build(kp.BuildRequest(operation=operation, names=[best])))
        assert events[-1].state in (kp.BuildEvent.BUILT, kp.BuildEvent.CACHED)


def test_statistics_count_each_direction(client: Client) -> None:
    before = {item.name: item.success for item in client.kernels.Statistics(kp.StatisticsRequest()).operations}
    for operation, (shapes, _, words) in CALLS.items():
        inputs = [cm.operand(name, cm.spec(*shape), inline(bytes(4 * prod(shape)))) for name, shape in shapes.items()]
        client.dispatch.Run(dp.RunRequest(operation=operation, inputs=inputs, attributes=cm.attributes(**words)))
    found = {item.name: item for item in client.kernels.Statistics(kp.StatisticsRequest()).operations}
    for operation in CALLS:
        assert found[operation].success > before.get(operation, 0)
