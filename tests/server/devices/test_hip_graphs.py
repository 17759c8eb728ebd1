"""Graphs on AMD's GPUs: products in several stages, replayed with other operands, and what is left of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_device_harness import ADD, GPUS, Gpu, N, get, put, settled, stage
from hip_device_cases import SIMULATED

from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.contract.device import Buffer, DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.gpu.launch.graph import BindingGraphs
from tilewright_server.devices.gpu.launch.program import GpuProgram
from tilewright_server.devices.gpu.stream import GpuStream
from tilewright_server.devices.hip.device import HipDevice

pytestmark = pytest.mark.gpu
GEMM = GemmOperation()
SPLITS = 3


@pytest.fixture(scope="module")
def kind() -> Gpu:
    return GPUS["hip"]


def counted() -> tuple[int, int]:
    """Graphs of the runtime, and those of them that can be launched."""
    if not SIMULATED:
        pytest.skip("only the simulated runtime says how many graphs there are")
    found = ctypes.c_uint(), ctypes.c_uint()
    assert ctypes.CDLL(SIMULATED).simGraphs(*map(ctypes.byref, found)) == 0
    return found[0].value, found[1].value


def graphs_of(stream: GpuStream, program: GpuProgram) -> BindingGraphs:
    graph = stream.lane._prepared[program].graph
    assert isinstance(graph, BindingGraphs)
    return graph


# Products


@dataclass(frozen=True)
class Chain:
    """out = (a b) d, both products in slices of K, through an operand ``t``."""

    program: GpuProgram
    scratch: Buffer

    @classmethod
    def of(cls, gpu: HipDevice, build: Callable[..., Path], m: int, k: int, n: int, p: int) -> Chain:
        plans = [cls.planned(gpu.info, *shape) for shape in ((m, n, k), (m, p, n))]
        names = ({"out": "t"}, {"a": "t", "b": "d"})
        stages = []
        for (config, plan), renamed in zip(plans, names, strict=True):
            unit = GEMM.generate(config, gpu.info.arch)
            entries, module = unit.entries, gpu.load(build(unit, gpu.info.arch))
            for item in plan.stages:
                args = pack(item.args)
                moved = tuple((hole, renamed.get(name, name), addend) for hole, name, addend in args.relocations)
                function = module.function(entries[item.role])
                stages.append(ProgramStage(function, replace(args, relocations=moved), item.geometry))
        counters = max(plan.counter_bytes for _, plan in plans)
        scratch = max(plan.workspace_bytes for _, plan in plans)
        assert counters and scratch, "the products are not split"
        buffer = gpu.allocate(scratch)
        gpu.write(buffer, 0, memoryview(np.full(scratch, 0xFF, np.uint8)))
        return cls(gpu.program(stages, ["a", "b", "d", "t", "out"], counter_bytes=counters), buffer)

    @staticmethod
    def planned(info: DeviceInfo, m: int, n: int, k: int) -> tuple[Any, ExecutionPlan]:
        operands = {"a": TensorDesc.of("fp16", (m, k)), "b": TensorDesc.of("fp16", (k, n))}
        problem = GEMM.parse(OperationRequest("gemm", operands, {}, {"split_k": SPLITS}))
        fitting = [item for item in GEMM.candidates(problem, info) if not GEMM.mismatches(problem, item, info)]
        config = min(fitting, key=lambda item: (item.tile, item.name))
        return config, GEMM.plan(problem, config, info)


class Operands:
    """Small whole numbers, so that sums are exact; ``product`` is what must come out, rounded once."""

    def __init__(self, gpu: HipDevice, seed: int, m: int, k: int, n: int, p: int) -> None:
        generator = np.random.default_rng(seed)
        a, b, d = (generator.integers(-2, 3, shape).astype(np.float16) for shape in ((m, k), (k, n), (n, p)))
        self.product = (a.astype(np.float64) @ b.astype(np.float64) @ d.astype(np.float64)).astype(np.float16)
        self.gpu = gpu
        self.buffers = [put(gpu, array) for array in (a, b, d)]
        self.buffers += [gpu.allocate(2 * m * n), gpu.allocate(2 * m * p)]
        self.addresses = tuple(buffer.address for buffer in self.buffers)

    def spoil(self) -> None:
        for buffer in self.buffers[3:]:
            self.gpu.write(buffer, 0, memoryview(np.full(buffer.nbytes // 2, np.nan, np.float16)))

    def check(self) -> None:
        assert np.abs(self.product).max() > 100
        assert (get(self.gpu, self.buffers[4], np.float16).reshape(self.product.shape) == self.product).all()


SHAPE = (37, 203, 61, 45)


def test_split_products_are_right_as_a_graph_and_with_other_operands(
    gpu: HipDevice, build: Callable[..., Path]
) -> None:
    chain, stream = Chain.of(gpu, build, *SHAPE), gpu.open_stream()
    operands = [Operands(gpu, seed, *SHAPE) for seed in (1, 2)]
    for item in operands:  # a first time stage by stage
        stream.launch(chain.program, item.addresses, 0, 0, chain.scratch.address)
    graphs = graphs_of(stream, chain.program)
    assert [graphs._graphs[bound] for bound in graphs._graphs] == [None, None]
    for turn in range(2):
        for item in operands:
            item.spoil()
            stream.launch(chain.program, item.addresses, 0, 0, chain.scratch.address)
        stream.synchronize()
        for item in operands:
            item.check()
        made = list(graphs._graphs.values())
        assert None not in made, turn
    operands[0].spoil()
    chain.program.run(operands[0].addresses, chain.scratch.address, repeat=3)
    operands[0].check()
    stream.close()


# What is left of them


def adding(gpu: HipDevice, entry: Callable[[str], int]) -> GpuProgram:
    """out = x + y, twice."""
    return gpu.program([stage(entry("add"), ADD), stage(entry("then_add"), ADD)], ["x", "y", "out"])


def operands_of(gpu: HipDevice, count: int) -> list[tuple[int, int, int]]:
    x = put(gpu, np.ones(N, np.float32)).address
    return [(x, x, gpu.allocate(4 * N).address) for _ in range(count)]


def test_graphs_end_with_their_bindings_programs_and_streams(gpu: HipDevice, entry: Callable[[str], int]) -> None:
    before = counted()
    program, stream = adding(gpu, entry), gpu.open_stream()
    stream.lane._limit = 3
    operands = operands_of(gpu, 5)
    for _ in range(2):
        for addresses in operands[:3]:
            stream.launch(program, addresses, 0, 0)
    assert counted() == (before[0] + 3, before[1] + 3)
    for addresses in operands[3:]:  # more bindings than are kept: the first ones go
        stream.launch(program, addresses, 0, 0)
    assert counted() == (before[0] + 1, before[1] + 1)
    program.close()
    other = adding(gpu, entry)
    for _ in range(2):
        stream.launch(other, operands[0], 0, 0)
    assert counted() == (before[0] + 1, before[1] + 1)
    stream.close()
    assert settled(lambda: counted() == before)
    last = adding(gpu, entry)
    last.run(operands[0], 0, repeat=3)  # a lane of the device's own
    assert counted() == (before[0] + 1, before[1] + 1)
    gpu.close()
    assert counted() == before


def test_bindings_beyond_the_limit_are_launched_stage_by_stage(
    gpu: HipDevice, entry: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BindingGraphs, "limit", 2)
    program, stream = adding(gpu, entry), gpu.open_stream()
    outs = [put(gpu, np.full(N, np.nan, np.float32)) for _ in range(4)]
    x = put(gpu, np.full(N, 3, np.float32))
    for _ in range(3):
        for out in outs:
            stream.launch(program, (x.address, x.address, out.address), 0, 0)
    graphs = graphs_of(stream, program)
    assert sum(graph is not None for graph in graphs._graphs.values()) == 2
    assert graphs.is_usable
    stream.synchronize()
    assert all((get(gpu, out) == 6).all() for out in outs)
    stream.close()


def test_graph_that_finds_no_memory_leaves_stage_by_stage(
    gpu: HipDevice, entry: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counted()
    program, stream = adding(gpu, entry), gpu.open_stream()
    x, out = put(gpu, np.full(N, 3, np.float32)), put(gpu, np.full(N, np.nan, np.float32))
    monkeypatch.setitem(os.environ, "TW_SIM_FAULT_GRAPH", "1")
    for _ in range(3):
        stream.launch(program, (x.address, x.address, out.address), 0, 0)
    assert not graphs_of(stream, program).is_usable
    assert counted() == before
    stream.synchronize()
    assert (get(gpu, out) == 6).all()
    stream.close()


def test_a_launch_that_cannot_be_captured_leaves_nothing_behind(
    gpu: HipDevice, entry: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counted()
    program, stream = adding(gpu, entry), gpu.open_stream()
    x, out = put(gpu, np.full(N, 3, np.float32)), put(gpu, np.full(N, np.nan, np.float32))
    stream.launch(program, (x.address, x.address, out.address), 0, 0)
    with monkeypatch.context() as patch:
        refusal = (gpu._driver.api.raw.hipError_t.hipErrorNotSupported,)
        patch.setattr(type(gpu._driver), "launch", property(lambda _: lambda *call: refusal))
        stream.launch(program, (x.address, x.address, out.address), 0, 0)
    assert not graphs_of(stream, program).is_usable
    assert counted() == before
    stream.synchronize()
    assert (get(gpu, out) == 6).all()
    stream.close()


def test_arguments_of_graphs_are_never_replaced(gpu: HipDevice, entry: Callable[[str], int]) -> None:
    """The runtime keeps the memory of arguments that are replaced until the graph ends."""
    program, stream = adding(gpu, entry), gpu.open_stream()
    operands = operands_of(gpu, 2)
    for addresses in operands * 2:
        stream.launch(program, addresses, 0, 0)
    graphs = graphs_of(stream, program)._graphs
    made = dict(graphs)
    alone: list[Any] = []
    assert len(made) == 2
    assert None not in made.values()
    for bound in graphs:
        bound._launch = lambda *call: (0, alone.append(call))
    for addresses in operands * 3:
        stream.launch(program, addresses, 0, 0)
    assert alone == []
    assert graphs == made
    stream.synchronize()
    stream.close()
