"""Portable GPU kernels, generated and planned as for a device, run on the CPU: what a plan says is what a kernel reads.

The host platform of the kernels makes every thread of a workgroup a fiber; see ``tests/native/test_gpu_gemm.py``.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemm_runner import INCLUDE, Array, Memory, compiler, draw
from libraries import Libraries

import tilewright_arch
from tilewright_gemm import fusion
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.references.samples import gemm_samples
from tilewright_gemm.vocabulary import LAYOUTS, ScaleB
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.composition import Composition
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
FLAGS = (
    "-std=c++17", "-Og", "-shared", "-fPIC", "-fvisibility=hidden", "-DTW_PLATFORM_HOST", "-DTW_HOST_WAVE=32",
    "-Wno-unknown-pragmas",
)  # fmt: skip
UNITS = 3
"""So few that persistent workgroups have several tiles each."""
of = TensorDesc.of


class Emulated:
    """Builds kernels of CUDA devices for the CPU, and runs plans."""

    def __init__(self, folder: Path) -> None:
        self._units = Libraries(compiler(), [*FLAGS, f"-I{INCLUDE}"], folder)

    def prepare(self, configs: Iterable[GemmConfig], device: DeviceInfo) -> None:
        """Build several kernels together."""
        self._units.build(generate(config, device.arch) for config in configs)

    def function(self, config: GemmConfig, device: DeviceInfo) -> Any:
        unit = generate(config, device.arch)
        return getattr(self._units.load(unit), unit.entries["main"])

    def run(self, plan: ExecutionPlan, inputs: Mapping[str, Array], device: DeviceInfo) -> dict[str, Memory]:
        """Execute the plan's launch; returns every tensor's memory."""
        memory = {
            item.name: Memory.of(item.desc, inputs[item.name] if item.role is Role.INPUT else None)
            for item in plan.operands
        }
        workspace = np.full(plan.workspace_bytes + 128, 0xA5, np.uint8)
        counters = np.zeros(plan.counter_bytes // 4 + 1, np.uint32)
        start = -(-workspace.ctypes.data // 64) * 64
        addresses = {name: item.address for name, item in memory.items()}
        addresses |= {WORKSPACE: start, COUNTERS: counters.ctypes.data}
        for stage in plan.stages:
            packed, geometry = pack(stage.args), stage.geometry
            block = bytearray(len(packed.template))
            store = (ctypes.c_char * (len(block) + 64))()
            base = -(-ctypes.addressof(store) // 64) * 64
            packed.bind(addresses, block, base)
            ctypes.memmove(base, bytes(block), len(block))
            config = stage.config
            assert isinstance(config, GemmConfig)
            function = self.function(config, device)
            status = function(ctypes.c_void_p(base), geometry.grid[0], geometry.shared_bytes, ctypes.c_uint(1))
            assert status == 0, f"{config.name} failed"
        assert not counters.any(), "the launch leaves its counters as it found them"
        end = start - workspace.ctypes.data + plan.workspace_bytes
        assert np.all(workspace[end:] == 0xA5), "the workspace was overrun"
        assert not any(item.overrun() for item in memory.values())
        return memory


@pytest.fixture(scope="module")
def emulated(kernel_folder: Path) -> Emulated:
    return Emulated(kernel_folder)


@pytest.fixture(scope="module")
def hopper() -> DeviceInfo:
    return dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=UNITS)


def small(problem: GemmProblem, **fields: Any) -> GemmConfig:
    """A kernel of small tiles that computes the problem."""
    size = problem.dtype_a.bytes
    config = GemmConfig(
        dtype_a=problem.dtype_a,
        tile=(32, 32, 64 // size),
        wave=(2, 2, 1),
        warp_tile=(16, 8, 4 if size == 4 else 32 // size),
        stages=3,
    )
    if problem.int4:  # of columns of any alignment
        fields = {"pipeline": "compv3", **fields}
    if fields.get("pipeline") == "compv3":
        fields["stages"] = 0
    made = with_signature(problem, config)
    if made.scale_b is ScaleB.BLOCK_1X32:  # steps along k are blocks
        fields = {"tile": (32, 32, 32), **fields}
    return made.replace(**fields)


def check(emulated: Emulated, request: OperationRequest, device: DeviceInfo, **fields: Any) -> ExecutionPlan:
    problem = GEMM.parse(request)
    config = small(problem, **fields)
    assert not GEMM.rules.check(config, device.arch), GEMM.rules.check(config, device.arch)
    assert not GEMM.mismatches(problem, config, device), GEMM.mismatches(problem, config, device)
    plan = GEMM.plan(problem, config, device)
    rng = np.random.default_rng(7)
    inputs = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    if config.scale_b is ScaleB.BLOCK_1X32:  # exponents whose products are finite
        scales = {name: array.shape for name, array in inputs.items() if name.startswith("scale_")}
        inputs |= {name: rng.integers(121, 134, shape).astype(np.uint8).view(np.int8) for name, shape in scales.items()}
    memory = emulated.run(plan, inputs, device)
    truth = GEMM.reference(problem, inputs)
    for item in problem.operands:
        if item.role is Role.OUTPUT:
            depth = max(product.k for product in problem.products)
            result = compare(
                memory[item.name].view, truth[item.name], problem.dtype_c, max(depth, 1), problem.dtype_acc
            )
            assert result.passed, f"{item.name} of {config.name}: {result}"
    return plan


@pytest.mark.parametrize("request_", list(gemm_samples()), ids=lambda request: "-".join(map(str, request.inputs)))
@pytest.mark.some(5)
def test_samples_are_right(request_: OperationRequest, emulated: Emulated, hopper: DeviceInfo) -> None:
    emulated.prepare([small(GEMM.parse(request)) for request in gemm_samples()], hopper)  # for all of these tests
    check(emulated, request_, hopper)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", [{}, {"pipeline": "compv3"}, {"persistent": True}], ids=str)
@pytest.mark.some(6)
def test_odd_sizes_in_every_layout(layout: str, fields: dict[str, Any], emulated: Emulated, hopper: DeviceInfo) -> None:
    def request(layout: str) -> OperationRequest:
        m, n, k = 45, 77, 51
        inputs = {
            "a": of("bf16", (m, k), (k + 3, 1) if layout[0] == "r" else (1, m + 2)),
            "b": of("bf16", (k, n), (n + 1, 1) if layout[1] == "r" else (1, k + 5)),
            "bias": of("fp32", (n,)),
        }
        return OperationRequest("gemm", inputs, {}, {"unary": "Relu"})

    emulated.prepare([small(GEMM.parse(request(each)), **fields) for each in LAYOUTS], hopper)
    check(emulated, request(layout), hopper, **fields)


@pytest.mark.extended
def test_slices_of_k_and_groups_and_batches(emulated: Emulated, hopper: DeviceInfo) -> None:
    split = OperationRequest("gemm", {"a": of("fp16", (40, 500)), "b": of("fp16", (500, 70))})
    plan = check(emulated, split, hopper, split_k=5, persistent=True)
    assert plan.workspace_bytes == 2 * 3 * 4 * 32 * 32 * 4  # slices are whole tiles of K: four of 128
    inputs = {}
    for group, (rows, depth) in enumerate(((70, 33), (0, 20), (5, 0), (1, 100))):
        inputs |= {f"a[{group}]": of("fp16", (rows, depth)), f"b[{group}]": of("fp16", (depth, 40))}
        inputs[f"d[{group}][0]"] = of("fp16", (rows, 40))
    check(emulated, OperationRequest("gemm", inputs), hopper)
    batch = {"a": of("fp16", (3, 33, 20)), "b": of("fp16", (3, 20, 40)), "d[0]": of("fp32", (3, 33, 1))}
    check(emulated, OperationRequest("gemm", batch, {}, {"alpha": 0.5}), hopper, split_k=2)


@pytest.mark.extended
def test_what_is_chosen_for_unaligned_operands_is_right(emulated: Emulated, hopper: DeviceInfo) -> None:
    request = OperationRequest("gemm", {"a": of("bf16", (33, 77)), "b": of("bf16", (77, 41), (1, 77))})
    problem = GEMM.parse(request)
    for config in GEMM.candidates(problem, hopper)[:2]:
        check(emulated, request, hopper, **{name: getattr(config, name) for name in ("tile", "wave", "stages")})


@pytest.mark.extended
def test_products_that_are_composed_hand_results_on_in_the_workspace(emulated: Emulated, hopper: DeviceInfo) -> None:
    """As a plugin that builds on GEMM does; the first product shares K, and so needs scratch and counters."""
    m, n, k = 40, 48, 512
    first = fusion.parse_gemm(
        OperationRequest("gemm", {"a": of("fp32", (m, k)), "b": of("fp32", (k, n))}, {}, {"split_k": 2})
    )
    hidden = first.operands[-1].desc
    second = fusion.parse_gemm(OperationRequest("gemm", {"a": hidden, "b": of("fp32", (n, m))}))
    whole = Composition()
    between = whole.intermediate(hidden)
    for label, problem, operands in (
        ("first", first, {"a": "x", "b": "v", "out": between}),
        ("second", second, {"a": between, "b": "w", "out": "y"}),
    ):
        plan = fusion.plan_gemm(problem, small(problem, split_k=problem.split_k or 1), hopper)
        whole.add(label, plan, operands)
    named = {"x": first.operands[0], "v": first.operands[1], "w": second.operands[1], "y": second.operands[2]}
    tensors = tuple(dataclasses.replace(item, name=name) for name, item in named.items())
    plan = whole.plan("gemm", hopper.arch.id, tensors)
    assert len(plan.stages) == 2 and plan.counter_bytes > 0
    rng = np.random.default_rng(11)
    inputs = {item.name: draw(rng, item.desc) for item in tensors if item.role is Role.INPUT}
    found = emulated.run(plan, inputs, hopper)["y"].view
    x, v, w = (inputs[name].astype(np.float64) for name in ("x", "v", "w"))
    assert compare(found, x @ v @ w, DType.FP32, k).passed
