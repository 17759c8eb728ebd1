"""The main job: another process hands over real matrices, and a kernel compiled for them computes their product."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, eventually, floats, in_region, inline, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import tensor_pb2 as tp

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "gemm"]
SIZE = 48 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("gemm"), COMMAND) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as made:
        yield made


@pytest.fixture
def file(client: Client) -> Iterator[MemoryFile]:
    made = MemoryFile(SIZE)
    yield made
    made.close()


def matrices(file: MemoryFile, m: int, n: int, k: int) -> tuple[Any, Any, Any, list[int]]:
    """a, b and out in the file, filled, with their offsets."""
    shapes, offset, offsets, arrays = [(m, k), (k, n), (m, n)], 0, [], []
    for shape in shapes:
        count = shape[0] * shape[1]
        arrays.append(np.frombuffer(file.bytes, np.float32, count, offset).reshape(shape))
        offsets.append(offset)
        offset += -(-count * 4 // 4096) * 4096
    random = np.random.default_rng(7)
    for array in arrays[:2]:
        array[:] = random.standard_normal(array.shape, np.float32)
    return (*arrays, offsets)  # type: ignore[return-value]


def request(kind: Any, token: bytes, m: int, n: int, k: int, **more: Any) -> Any:
    inputs = [tp.Operand(name="a", spec=floats(m, k)), tp.Operand(name="b", spec=floats(k, n))]
    return kind(session=token, operation="gemm", inputs=inputs, **more)


@pytest.mark.extended
def test_run_with_inline_matrices(client: Client) -> None:
    a, b = (np.random.default_rng(3).standard_normal((33, 33), np.float32) for _ in range(2))
    message = request(dp.RunRequest, b"", 33, 33, 33)
    message.inputs[0].location.inline, message.inputs[1].location.inline = a.tobytes(), b.tobytes()
    reply = client.dispatch.Run(message)
    out = np.frombuffer(reply.outputs[0].inline, np.float32).reshape(33, 33)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)
    assert reply.report.kernels
    assert reply.report.timing.build_ns > 0
    assert not reply.report.plan_cached
    assert client.dispatch.Run(message).report.plan_cached


def test_large_matrices_in_shared_memory_are_never_copied(client: Client, file: MemoryFile) -> None:
    a, b, out, offsets = matrices(file, 1024, 1024, 4096)  # 16 MiB each for a and b
    region = client.register(file).region
    message = request(dp.RunRequest, client.token, 1024, 1024, 4096)
    message.outputs.add(name="out")
    for operand, offset in zip([*message.inputs, *message.outputs], offsets, strict=True):
        operand.location.CopyFrom(in_region(region, offset))
    report = client.dispatch.Run(message).report
    assert report.bytes_copied == 0
    np.testing.assert_allclose(out, a @ b, rtol=1e-3, atol=1e-2)
    client.unregister(region)


def test_a_prepared_plan_runs_alone_in_batches_and_on_a_stream(client: Client, file: MemoryFile) -> None:
    a, b, out, offsets = matrices(file, 64, 64, 64)
    region = client.register(file).region
    plan = client.dispatch.Plan(request(dp.PlanRequest, client.token, 64, 64, 64))
    assert [item.name for item in plan.inputs] == ["a", "b"]
    assert plan.flops == 2 * 64**3
    assert json.loads(plan.json)["stages"]
    execution = dp.Execution(plan=plan.plan, locations=[in_region(region, offset) for offset in offsets])
    message = dp.ExecuteRequest(session=client.token, executions=[execution])
    expected = a @ b
    for send in (
        lambda: client.dispatch.Execute(message),
        lambda: list(client.dispatch.ExecuteStream(iter([message] * 10)))[-1],
        lambda: client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution] * 64)),
    ):
        out[:] = 0
        reply = send()
        assert not any(result.HasField("error") for result in reply.results)
        assert reply.results[-1].device_ns > 0
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    repeated = dp.Execution(plan=plan.plan, locations=execution.locations, repeat=100)
    reply = client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[repeated]))
    assert reply.results[0].device_ns > 0
    client.unregister(region)


def test_an_output_over_an_input_is_refused(client: Client, file: MemoryFile) -> None:
    _, _, _, offsets = matrices(file, 64, 64, 64)
    region = client.register(file).region
    plan = client.dispatch.Plan(request(dp.PlanRequest, client.token, 64, 64, 64)).plan
    execution = client.execution(plan, *(in_region(region, offset) for offset in (offsets[0], offsets[1], offsets[0])))
    assert client.dispatch.Execute(execution).results[0].error.code == "invalid_argument"
    client.unregister(region)


def test_many_callers_of_one_new_kernel_build_it_once(server: ServerProcess, client: Client) -> None:
    before = client.kernels.Statistics(kp.StatisticsRequest()).artifact_builds
    message = request(dp.RunRequest, b"", 3, 200, 50)
    message.inputs[0].location.inline, message.inputs[1].location.inline = bytes(600), bytes(40000)
    replies: list[Any] = []

    def run() -> None:
        replies.append(client.dispatch.Run(message).report.kernels[:])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == 8
    stages = {kernel for kernels in replies for kernel in kernels}
    assert client.kernels.Statistics(kp.StatisticsRequest()).artifact_builds - before <= len(stages)


@pytest.mark.extended
def test_bad_problems_are_typed_errors(client: Client) -> None:
    def run(a: tp.TensorSpec, b: tp.TensorSpec, operation: str = "gemm", **more: Any) -> None:
        inputs = [tp.Operand(name=name, spec=spec, location=inline(bytes(64))) for name, spec in (("a", a), ("b", b))]
        client.dispatch.Run(dp.RunRequest(operation=operation, inputs=inputs, **more))

    with refused("invalid_argument"):
        run(floats(4, 4), floats(5, 4))
    with refused("invalid_argument"):
        run(floats(4, 4), tp.TensorSpec(dtype=99, shape=[4, 4]))  # type: ignore[arg-type]
    with refused("not_found"):
        run(floats(4, 4), floats(4, 4), "gmm")
    with refused("not_found"):
        run(floats(4, 4), floats(4, 4), selection=dp.Selection(kernel="no_such_kernel"))
    with refused("not_found"):
        run(floats(4, 4), floats(4, 4), selection=dp.Selection(strategy="luck"))
    with refused("not_found"):
        run(floats(4, 4), floats(4, 4), selection=dp.Selection(device="cuda:7"))
    with refused("invalid_argument", "enum"):
        run(floats(4, 4), floats(4, 4), selection=dp.Selection(build=9))  # type: ignore[arg-type]


def test_kernels_are_listed_described_exported_and_explained(client: Client) -> None:
    kernels = client.kernels
    first = kernels.List(kp.ListKernelsRequest(limit=5))
    assert len(first.kernels) == 5 < first.total
    assert "default" in first.kernel_sets
    second = kernels.List(kp.ListKernelsRequest(limit=5, offset=5))
    assert not {item.name for item in first.kernels} & {item.name for item in second.kernels}
    narrow = kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(operation="gemm", name="*bf16*"), limit=3))
    assert 0 < narrow.total < first.total
    one = first.kernels[0]
    described = kernels.Describe(kp.DescribeKernelRequest(operation=one.operation, name=one.name, source=True))
    assert described.summary.key == one.key
    assert json.loads(described.config_json)
    assert "#include" in described.source
    document = json.loads(kernels.Export(kp.ExportRequest(filter=kp.KernelFilter(name=one.name), statistics=True)).json)
    assert document["kernels"][0]["name"] == one.name
    inputs = request(dp.PlanRequest, b"", 64, 64, 64).inputs
    explained = json.loads(kernels.Explain(kp.ExplainRequest(operation="gemm", inputs=inputs)).json)
    assert explained["candidates"]
    with refused("not_found"):
        kernels.Describe(kp.DescribeKernelRequest(operation="gemm", name="nothing"))
    with refused("not_found"):
        kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(arch="pdp11")))


def test_configurations_are_validated_corrected_and_built(client: Client) -> None:
    kernels = client.kernels
    name = kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(operation="gemm", name="*fp32*"))).kernels[0].name
    described = kernels.Describe(kp.DescribeKernelRequest(operation="gemm", name=name))
    arch = described.summary.arch
    good = kernels.Validate(kp.ValidateConfigRequest(operation="gemm", arch=arch, config_json=described.config_json))
    assert good.valid
    assert good.name == name
    broken = json.loads(described.config_json) | {"pipeline": "no_such_pipeline"}
    bad = kernels.Validate(kp.ValidateConfigRequest(operation="gemm", arch=arch, config_json=json.dumps(broken)))
    assert not bad.valid
    assert bad.violations[0].reason
    mended = kernels.Correct(kp.CorrectConfigRequest(operation="gemm", arch=arch, config_json=json.dumps(broken)))
    assert mended.valid == (not mended.remaining)
    broken_texts = ["", "[]", "{", "1", '{"x":' * 10_000, '"' + "x" * 100_000 + '"']
    for text in (*broken_texts, '{"no_such_field": 1}', '{"tile": "x"}'):
        with refused("invalid_argument"):
            kernels.Validate(kp.ValidateConfigRequest(operation="gemm", arch=arch, config_json=text))
    events = list(kernels.Build(kp.BuildRequest(operation="gemm", names=[name])))
    assert events[-1].state in (kp.BuildEvent.BUILT, kp.BuildEvent.CACHED)
    assert (events[-1].done, events[-1].total) == (1, 1)
    again = list(kernels.Build(kp.BuildRequest(operation="gemm", names=[name])))
    assert again[-1].state == kp.BuildEvent.CACHED
    with refused("invalid_argument", "build_names"):
        list(kernels.Build(kp.BuildRequest(operation="gemm")))


def test_an_invalid_configuration_fails_to_build_with_its_reasons(client: Client) -> None:
    kernels = client.kernels
    name = kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(operation="gemm", name="*fp32*"))).kernels[0].name
    record = json.loads(kernels.Describe(kp.DescribeKernelRequest(operation="gemm", name=name)).config_json)
    build = kp.BuildRequest(operation="gemm", config_json=json.dumps(record | {"pipeline": "no_such_pipeline"}))
    try:
        events = list(kernels.Build(build))
        assert events[-1].state == kp.BuildEvent.FAILED
        assert events[-1].error.code in ("config_invalid", "invalid_argument")
    except grpc.RpcError as error:
        assert detail_of(error).code in ("config_invalid", "invalid_argument")


def test_packing_of_nothing_can_be_used(client: Client) -> None:
    b = tp.Operand(name="b", spec=floats(0, 5))
    packed = client.dispatch.Plan(dp.PlanRequest(session=client.token, operation="gemm_pack_b", inputs=[b])).outputs[0]
    assert packed.spec.packing
    message = request(dp.RunRequest, b"", 3, 5, 0)
    message.inputs[1].spec.CopyFrom(packed.spec)
    reply = client.dispatch.Run(message)
    assert reply.outputs[0].inline == bytes(3 * 5 * 4)


def test_kernels_are_built_by_name_without_their_operation(client: Client) -> None:
    kernels = client.kernels
    name = kernels.List(kp.ListKernelsRequest(filter=kp.KernelFilter(operation="gemm", name="*fp32*"))).kernels[0].name
    assert list(kernels.Build(kp.BuildRequest(names=[name])))[-1].state in (kp.BuildEvent.BUILT, kp.BuildEvent.CACHED)
    with refused("not_found", "kernel_name") as details:
        list(kernels.Build(kp.BuildRequest(names=["nope"])))
    assert details[0].fix
    assert "''" not in details[0].message


def test_repeats_end_at_the_deadline_and_with_the_session(server: ServerProcess, file: MemoryFile) -> None:
    with Client(server.addresses[0]) as client, Client(server.addresses[0]) as other:
        _, _, _, offsets = matrices(file, 512, 512, 512)
        region = client.register(file).region
        plan = client.dispatch.Plan(request(dp.PlanRequest, client.token, 512, 512, 512)).plan
        locations = [in_region(region, offset) for offset in offsets]
        execution = dp.Execution(plan=plan, locations=locations, repeat=1_000_000)
        message = dp.ExecuteRequest(session=client.token, executions=[execution])
        small = request(dp.RunRequest, b"", 4, 4, 4)
        small.inputs[0].location.inline = small.inputs[1].location.inline = bytes(64)
        other.dispatch.Run(small)

        running = client.dispatch.Execute.future(message)
        for _ in range(5):
            other.dispatch.Run(small, timeout=30)
        assert not running.done()
        running.cancel()

        message.timeout_ms = 200
        (reply,) = client.dispatch.ExecuteStream(iter([message]))
        assert reply.results[0].error.code == "deadline_exceeded"
        assert "of 1000000 repeats were done" in reply.results[0].error.message
        assert reply.results[0].error.fix

        message.timeout_ms = 0
        running = client.dispatch.Execute.future(message)
        assert eventually(lambda: client.status().regions[0].in_use)
        client.lease.cancel()
        assert running.result(10).results[0].error.rule == "session_ended"
        assert eventually(lambda: server.regions()[0] == 0)


@pytest.mark.extended
def test_stopping_cancels_repeats(tmp_path: Path, file: MemoryFile, kernel_cache: Path) -> None:
    started = ServerProcess(tmp_path, COMMAND, grace_s=0.3, cache_dir=kernel_cache)
    with started as server, Client(server.addresses[0]) as client:
        _, _, _, offsets = matrices(file, 256, 256, 256)
        region = client.register(file).region
        plan = client.dispatch.Plan(request(dp.PlanRequest, client.token, 256, 256, 256)).plan
        locations = [in_region(region, offset) for offset in offsets]
        execution = dp.Execution(plan=plan, locations=locations, repeat=1_000_000)
        running = client.dispatch.Execute.future(dp.ExecuteRequest(session=client.token, executions=[execution]))
        assert eventually(lambda: client.status().regions[0].in_use)
        assert server.stop() == 0
        assert running.exception(5)
        assert "given up" not in server.log()


def test_statistics_tell_what_was_done(client: Client) -> None:
    statistics = client.kernels.Statistics(kp.StatisticsRequest())
    gemm = next(item for item in statistics.operations if item.name == "gemm")
    assert gemm.success > 0
    assert statistics.kernels
    assert statistics.sessions == 1
    assert {plugin.name for plugin in statistics.plugins} == {"cpu", "gemm"}
    assert statistics.uptime_ns > 0
