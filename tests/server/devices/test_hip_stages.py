"""Products in several stages on AMD's GPUs, launched again with other operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_device_harness import GPUS, Gpu, get, put

from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.contract.device import Buffer, DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.gpu.launch.program import GpuProgram
from tilewright_server.devices.hip.device import HipDevice

pytestmark = pytest.mark.gpu
GEMM = GemmOperation()
SPLITS = 3


@pytest.fixture(scope="module")
def kind() -> Gpu:
    return GPUS["hip"]


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


def test_split_products_are_right_with_other_operands(gpu: HipDevice, build: Callable[..., Path]) -> None:
    chain, stream = Chain.of(gpu, build, *SHAPE), gpu.open_stream()
    operands = [Operands(gpu, seed, *SHAPE) for seed in (1, 2)]
    for _ in range(2):
        for item in operands:
            item.spoil()
            stream.launch(chain.program, item.addresses, 0, 0, chain.scratch.address)
        stream.synchronize()
        for item in operands:
            item.check()
    operands[0].spoil()
    chain.program.run(operands[0].addresses, chain.scratch.address, repeat=3)
    operands[0].check()
    stream.close()
