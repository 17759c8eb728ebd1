"""The smallest whole operation: ``out = x + scale * y`` on vectors. It implements every part of the contract.

It is what the kit's tests plant faults in, and the pattern for ``docs/adding-an-operation.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.declaration import AttributeSpec, Declaration, Example, OperandSpec, ValueType
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import F64, I64, ExecutionPlan, Geometry, Pointer, Stage, Struct
from tilewright_kit.contract.problem import Operand, OperationRequest, Problem, Role
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.kernel_sets.declare import ANY, KernelSet, declare
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_kit.tiles.cost.units import unit_efficiency
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

# ---- what is asked ----


@dataclass(frozen=True)
class ToyProblem(Problem):
    operation: ClassVar[str] = "toy"

    x: TensorDesc
    y: TensorDesc
    out: TensorDesc
    scale: float = 1.0

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand("x", self.x, Role.INPUT),
            Operand("y", self.y, Role.INPUT),
            Operand("out", self.out, Role.OUTPUT),
        )

    @property
    def flops(self) -> int:
        return 2 * self.out.size

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.x.dtype.value, "n": self.out.size, "scale": self.scale}


_VECTOR = (("[n]",), (1, 1), (DType.FP32, DType.FP16))
SCALE = AttributeSpec(
    "scale", "Factor of y.", (ValueType.INTEGER, ValueType.NUMBER), 1.0, constraint="Below 1e30 in size."
)
DECLARATION = Declaration(
    "Sum of two vectors: out = x + scale * y.",
    (
        OperandSpec("x", Role.INPUT, "First vector.", *_VECTOR),
        OperandSpec("y", Role.INPUT, "Second vector.", *_VECTOR),
        OperandSpec("out", Role.OUTPUT, "The sum.", *_VECTOR),
    ),
    (SCALE,),
    (
        Example(
            "Twice y added", OperationRequest("toy", dict.fromkeys("xy", TensorDesc.of("fp32", (8,))), {}, {"scale": 2})
        ),
    ),
)


def _refuse(field: str, value: object, reason: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(reason, field=field, value=value, rule="toy_request", fix=fix)


def parse(request: OperationRequest) -> ToyProblem:
    for side, tensors, known in (("inputs", request.inputs, {"x", "y"}), ("outputs", request.outputs, {"out"})):
        for name, desc in tensors.items():
            if name not in known:
                raise _refuse(f"{side}.{name}", name, "toy has no such tensor", f"use {sorted(known)}")
            desc.check(f"{side}.{name}")
            if desc.packing or len(desc.shape) != 1 or desc.dtype not in (DType.FP32, DType.FP16):
                raise _refuse(f"{side}.{name}", desc, "toy adds plain vectors of fp32 or fp16", "convert it")
            if desc.size > 1 and desc.strides[0] == 0 and side == "outputs":
                raise _refuse(f"{side}.{name}", desc, "an output cannot be broadcast", "give it a stride")
    if set(request.inputs) != {"x", "y"}:
        raise _refuse("inputs", sorted(request.inputs), "toy needs x and y", "give both")
    x, y = request.inputs["x"], request.inputs["y"]
    out = request.outputs.get("out", TensorDesc.of(x.dtype, x.shape))
    if not (x.shape == y.shape == out.shape and x.dtype == y.dtype == out.dtype):
        raise _refuse("inputs.y", y, "x, y and out must have one shape and one type", "make them equal")
    unknown = set(request.attributes) - {SCALE.name}
    scale = request.attributes.get(SCALE.name, SCALE.default)
    if unknown or isinstance(scale, (bool, str, tuple)) or not -1e30 < scale < 1e30:
        raise _refuse("attributes", dict(request.attributes), "scale is a number below 1e30", "give a number")
    return ToyProblem(x, y, out, float(scale))


# ---- how its kernels vary ----


@dataclass(frozen=True)
class ToyConfig(KernelConfig):
    operation: ClassVar[str] = "toy"
    signature_fields: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: DType = part(DType.FP32)  # noqa: RUF009
    pipeline: str = part("mem")
    tile: tuple[int, int, int] = part((1024, 1, 1))
    vector: int = part(4)
    streaming: bool = suffix("nt", False)


# ---- what of that is valid ----

_TYPES = {DType.FP32: "float", DType.FP16: "_Float16"}


def vector_fits(config: ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
    widest = max(1, arch.vector_bytes // config.dtype.bytes)
    if not 1 <= config.vector <= widest:
        fix = {"vector": min(max(1, config.vector), widest)}
        yield Violation("vector_fits", "vector", config.vector, f"registers hold 1 to {widest} elements", fix)


def tile_is_whole_vectors(config: ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
    step = max(1, config.vector)
    if not (config.tile[1:] == (1, 1) and 1 <= config.tile[0] <= 65536 and config.tile[0] % step == 0):
        whole = min(max(ceil_div(max(1, config.tile[0]), step) * step, step), 65536 // step * step)
        fix = {"tile": (whole, 1, 1)} if step <= 65536 else {}
        yield Violation("tile_is_whole_vectors", "tile", config.tile, f"a tile is whole vectors of {step}", fix)


def pipeline_is_offered(config: ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
    if config.pipeline not in arch.pipelines:
        offered = ", ".join(arch.pipelines)
        fix = {"pipeline": "mem"} if "mem" in arch.pipelines else {}
        yield Violation("pipeline_is_offered", "pipeline", config.pipeline, f"{arch.name} has {offered}", fix)


def dtype_is_known(config: ToyConfig, arch: ArchSpec) -> Iterator[Violation]:
    if config.dtype not in _TYPES:
        yield Violation("dtype_is_known", "dtype", config.dtype, "toy adds fp32 and fp16", {"dtype": DType.FP32})


RULES: RuleBook[ToyConfig] = RuleBook([dtype_is_known, vector_fits, tile_is_whole_vectors, pipeline_is_offered])


def choices(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    if field == "tile":
        return [(size, 1, 1) for size in (4096, 1024, 256)]
    if field == "vector":
        return [16, 8, 4, 2, 1]
    return list(arch.pipelines) if field == "pipeline" else None


def prefilter(partial: Mapping[str, Any], arch: ArchSpec) -> bool:
    return partial.get("vector", 1) <= max(1, arch.vector_bytes)


DEFAULT = KernelSet(
    "default",
    "fast ones, and one that runs everywhere",
    (
        declare(ToyConfig, dtype=[DType.FP32, "fp16"], tile=ANY, vector="*", pipeline="*", streaming="*"),
        declare(ToyConfig, dtype=["fp32", "fp16"], tile=(1, 1, 1), vector=1).on("*"),
    ),
    choices,
    prefilter,
)


# ---- source, plan, cost, truth ----


def generate(config: ToyConfig, arch: ArchSpec, version: str) -> SourceUnit:
    RULES.require(config, arch)
    symbol = "tw_" + "".join(c if c.isalnum() else "_" for c in config.name)
    text = (
        '#include "tilewright/toy.hpp"\n'
        f'extern "C" void {symbol}(const void* args, tw_team* team) {{\n'
        f"  tw::toy<{_TYPES[config.dtype]}, {config.tile[0]}, {config.vector}, {int(config.streaming)}, "
        f"tw::{config.pipeline}>(args, team);\n}}\n"
    )
    return SourceUnit(config.name, "c++", text, {"main": symbol}, plugin_version=version)


class ToyOperation:
    """``out = x + scale * y``."""

    name = "toy"
    version = "1"
    config_type = ToyConfig
    rules = RULES
    kernel_sets: Mapping[str, KernelSet[ToyConfig]] = {"default": DEFAULT}
    declaration = DECLARATION

    def parse(self, request: OperationRequest) -> ToyProblem:
        return parse(request)

    def candidates(self, problem: ToyProblem, device: DeviceInfo) -> Sequence[ToyConfig]:
        kernels = self.kernel_sets["default"].expand(device.arch, self.rules)
        return [config for config in kernels if not self.mismatches(problem, config, device)]

    def mismatches(self, problem: ToyProblem, config: ToyConfig, device: DeviceInfo) -> Sequence[Violation]:
        found = []
        if config.dtype is not problem.x.dtype:
            found.append(Violation("dtype", "dtype", config.dtype, f"the problem is in {problem.x.dtype}"))
        unit = all(desc.is_contiguous for desc in (problem.x, problem.y, problem.out))
        if config.vector > 1 and not unit:
            found.append(Violation("contiguous", "vector", config.vector, "strided vectors are read one by one"))
        return found

    def generate(self, config: ToyConfig, arch: ArchSpec) -> SourceUnit:
        return generate(config, arch, self.version)

    def plan(self, problem: ToyProblem, config: ToyConfig, device: DeviceInfo) -> ExecutionPlan:
        numbers = [problem.out.size, problem.x.strides[0], problem.y.strides[0], problem.out.strides[0]]
        args = Struct(
            (Pointer("x"), Pointer("y"), Pointer("out"), *(I64(number) for number in numbers), F64(problem.scale))
        )
        blocks = ceil_div(problem.out.size, config.tile[0])
        geometry = Geometry(team=max(1, min(device.units, blocks)), grid=(max(1, blocks), 1, 1))
        stages = () if problem.is_empty else (Stage("add", config, "main", args, geometry),)
        return ExecutionPlan(
            self.name,
            device.arch.id,
            problem.operands,
            stages,
            flops=problem.flops,
            bytes_moved=problem.bytes_moved,
        )

    def predict(self, problem: ToyProblem, config: ToyConfig, device: DeviceInfo) -> Prediction:
        blocks = ceil_div(problem.out.size, config.tile[0])
        rate = 1e9 * config.vector * device.units * unit_efficiency(blocks, device.units)
        compute = 2.0 * blocks * config.tile[0] / rate
        memory = problem.bytes_moved / 1e10
        return Prediction(max(compute, memory) + 2e-6, {"compute": compute, "memory": memory, "launch": 2e-6})

    def reference(self, problem: ToyProblem, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        x, y = inputs["x"].astype(np.float64), inputs["y"].astype(np.float64)
        return {"out": x + problem.scale * y}

    def samples(self) -> Iterable[OperationRequest]:
        for dtype, n in (("fp32", 1), ("fp32", 1000), ("fp16", 4096), ("fp32", 0)):
            vector = TensorDesc.of(dtype, (n,))
            yield OperationRequest("toy", {"x": vector, "y": vector}, attributes={"scale": 0.5})
        spread = TensorDesc.of("fp16", (33,), (2,))
        yield OperationRequest("toy", {"x": spread, "y": TensorDesc.of("fp16", (33,), (0,))})


@hookimpl
def tilewright_operations() -> Sequence[ToyOperation]:
    return [ToyOperation()]
