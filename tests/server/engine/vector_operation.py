"""An operation small enough to hold in the head: ``out = x + scale * y`` on fp32 vectors, in one stage or two.

It has what the engine's tests need of an operation: several candidates, a kernel that does not compile, a plan with
workspace and a kernel that takes as long as one wants.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import F64, I64, WORKSPACE, ExecutionPlan, Geometry, Pointer, Stage, Struct
from tilewright_kit.contract.problem import Operand, OperationRequest, Problem, Role
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.kernel_sets.declare import KernelSet, declare
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

TEMPLATE = """#include "tilewright/cpu/team.h"
struct Args { const float* x; const float* y; float* out; float* scratch; int64_t n; double scale; };
#define TW_ENTRY extern "C" __attribute__((visibility("default"))) void
static inline int64_t edge(const Args* a, int64_t part, int64_t parts) { return a->n * part / parts; }
TW_ENTRY NAME_main(const void* args, tw_team* team) {
  const Args* a = (const Args*)args;
  if (FAULTS && a->x[0] < 0) *(volatile int*)8 = 1;
  for (int64_t i = edge(a, team->rank, team->size); i < edge(a, team->rank + 1, team->size); i++)
    a->out[i] = a->x[i] + (float)a->scale * a->y[i];
}
TW_ENTRY NAME_scale(const void* args, tw_team* team) {
  const Args* a = (const Args*)args;
  for (int64_t i = edge(a, team->rank, team->size); i < edge(a, team->rank + 1, team->size); i++)
    a->scratch[i] = (float)a->scale * a->y[i];
}
TW_ENTRY NAME_add(const void* args, tw_team* team) {
  const Args* a = (const Args*)args;
  for (int64_t i = edge(a, team->rank, team->size); i < edge(a, team->rank + 1, team->size); i++)
    a->out[i] = a->x[i] + a->scratch[i];
}
"""


@dataclass(frozen=True)
class VectorProblem(Problem):
    operation: ClassVar[str] = "vector"

    x: TensorDesc
    y: TensorDesc
    out: TensorDesc
    scale: float = 1.0
    alignment: int = 0

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
        return {"n": self.out.size, "scale": self.scale}


@dataclass(frozen=True)
class VectorConfig(KernelConfig):
    operation: ClassVar[str] = "vector"

    rank: int = part(1)
    """The predicted time: the best candidate has the lowest."""
    stages: int = part(1)
    team: int = part(1)
    broken: bool = suffix("broken", False)
    faults: bool = suffix("faults", False)
    """Ends its process if the first element of x is negative."""


def team_is_positive(config: VectorConfig, arch: ArchSpec) -> Iterable[Violation]:
    if config.team < 1:
        yield Violation("team_is_positive", "team", config.team, "a team has at least one thread", {"team": 1})


RULES: RuleBook[VectorConfig] = RuleBook([team_is_positive])
SETS = {
    "default": KernelSet(
        "default",
        "all that compile",
        (declare(VectorConfig, rank=[1, 2, 3]), declare(VectorConfig, rank=4, stages=2)),
    ),
    "broken": KernelSet("broken", "what does not compile", (declare(VectorConfig, rank=9, broken=True),)),
    "teams": KernelSet("teams", "on several threads", (declare(VectorConfig, rank=8, team=[2]),)),
}


class VectorOperation:
    name = "vector"
    version = "1"
    config_type = VectorConfig
    rules = RULES
    kernel_sets: Mapping[str, KernelSet[VectorConfig]] = SETS

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.faulty: tuple[VectorConfig, ...] = ()
        """Candidates that are added to the others; those with rank 0 come first."""
        self._lock = threading.Lock()

    def _count(self, what: str) -> None:
        with self._lock:
            self.calls[what] += 1

    def parse(self, request: OperationRequest) -> VectorProblem:
        self._count("parse")
        if set(request.inputs) != {"x", "y"}:
            raise InvalidArgumentError("vector needs x and y", field="inputs", rule="vector_inputs")
        x, y = request.inputs["x"], request.inputs["y"]
        out = request.outputs.get("out", TensorDesc.of(DType.FP32, x.shape))
        if not x.shape == y.shape == out.shape:
            raise InvalidArgumentError("x, y and out differ in shape", field="inputs.y", rule="vector_shape")
        scale = request.attributes.get("scale", 1.0)
        if isinstance(scale, (bool, str, tuple)):
            raise InvalidArgumentError("scale is a number", field="scale", value=scale, rule="vector_scale")
        return VectorProblem(x, y, out, float(scale), int(request.attributes.get("alignment", 0)))  # type: ignore[call-overload]

    def candidates(self, problem: VectorProblem, device: DeviceInfo) -> Sequence[VectorConfig]:
        return [*self.faulty, *self.kernel_sets["default"].expand(device.arch, self.rules)]

    def mismatches(self, problem: VectorProblem, config: VectorConfig, device: DeviceInfo) -> Sequence[Violation]:
        return []

    def generate(self, config: VectorConfig, arch: ArchSpec) -> SourceUnit:
        self._count("generate")
        symbol = f"vector_{config.rank}_{config.stages}"
        text = TEMPLATE.replace("NAME", symbol).replace("FAULTS", str(int(config.faults)))
        text += "#error planted by the test\n" if config.broken else ""
        entries = {role: f"{symbol}_{role}" for role in ("main", "scale", "add")}
        return SourceUnit(config.name, "c++", text, entries, plugin_version=self.version)

    def plan(self, problem: VectorProblem, config: VectorConfig, device: DeviceInfo) -> ExecutionPlan:
        self._count("plan")
        scratch = Pointer(WORKSPACE) if config.stages == 2 else Pointer()
        numbers = (I64(problem.out.size), F64(problem.scale))
        args = Struct((Pointer("x"), Pointer("y"), Pointer("out"), scratch, *numbers))
        roles = ("scale", "add") if config.stages == 2 else ("main",)
        geometry = Geometry(team=config.team)
        return ExecutionPlan(
            self.name,
            device.arch.id,
            problem.operands,
            tuple(Stage(role, config, role, args, geometry) for role in roles),
            workspace_bytes=problem.out.nbytes if config.stages == 2 else 0,
            flops=problem.flops,
            details={"alignment": {"x": problem.alignment, "out": 4}} if problem.alignment else {},
        )

    def predict(self, problem: VectorProblem, config: VectorConfig, device: DeviceInfo) -> Prediction:
        return Prediction(config.rank * 1e-6)

    def reference(self, problem: VectorProblem, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"out": inputs["x"].astype(np.float64) + problem.scale * inputs["y"].astype(np.float64)}

    def samples(self) -> Iterable[OperationRequest]:
        return [request(n) for n in (0, 1, 1000)]


def request(n: int, **attributes: Any) -> OperationRequest:
    vector = TensorDesc.of(DType.FP32, (n,))
    return OperationRequest("vector", {"x": vector, "y": vector}, attributes=attributes)


class VectorPlugin:
    """What a plugin manager loads."""

    def __init__(self) -> None:
        self.operation = VectorOperation()

    @hookimpl
    def tilewright_operations(self) -> Sequence[VectorOperation]:
        return [self.operation]
