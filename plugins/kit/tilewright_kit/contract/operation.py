"""The contract of an operation: what a plugin gives to the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Problem
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.types.dtypes import DType

__all__ = ["Operation", "Prediction", "Product"]

P = TypeVar("P", bound=Problem)
C = TypeVar("C", bound=KernelConfig)
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a cost model expects of a kernel on a problem. ``parts`` names what the time is made of, in seconds."""

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Product:
    """A problem as the matrix products that its kernels compute: what static analysis goes by."""

    m: int
    n: int
    k: int
    batch: int
    """Products of that size."""
    dtype: DType
    """Of the first operand: whose peak rate counts."""
    dtype_out: DType
    bytes_in: int
    """Of all operands in memory, each once."""
    bytes_out: int


class Operation(Protocol[P, C]):
    """One operation. Implementations are stateless and thread-safe; no method touches a device or a compiler.

    Beyond these an operation may offer what only some commands ask for:

    - ``spaces``: kernel sets for tuning;
    - ``refusal(problem, device)``: why there is nothing for a device, if so;
    - ``value_operands(problem)`` and ``check_values(problem, values)``: the names of operands whose content must make
      sense (lengths, indices), and a check of it, which raises ``InvalidArgumentError``. The server makes it before
      every launch with those of them whose memory it can read, so it should take a few microseconds;
    - ``sample_inputs(request, rng)``: content for inputs of ``samples`` that must mean something, by name;
    - ``select_set(arch, **options)`` with ``generate_options``, the names of its options: kernels as
      ``kernels generate`` chooses them; ``variants``, other spellings of operations and which they are;
    - ``analysis_shape(config)``, ``analysis_request(config, shape)`` and ``product_of(problem)``: for
      ``kernels analyze`` a usual problem of a kernel as text, the request that such a text means, and the ``Product``
      that a problem is.
    """

    name: str
    """The word that callers use: ``gemm``."""
    version: str
    """Part of every artifact key: a new version never reuses an old binary."""
    config_type: type[C]
    rules: RuleBook[C]
    kernel_sets: Mapping[str, KernelSet[C]]
    """Named declarations; ``default`` is what candidates come from."""

    def parse(self, request: OperationRequest) -> P:
        """Check a request and infer what it left out.

        Raises ``InvalidArgumentError`` or ``UnsupportedError``, never anything else.
        """
        ...

    def candidates(self, problem: P, device: DeviceInfo) -> Sequence[C]:
        """Valid configurations that compute ``problem`` on the device, in a fixed order, the most general last.

        Where there is none the operation may say why: it may raise ``UnsupportedError``, which names what there is.
        """
        ...

    def mismatches(self, problem: P, config: C, device: DeviceInfo) -> Sequence[Violation]:
        """Why this kernel cannot compute this problem on this device; empty if it can."""
        ...

    def generate(self, config: C, arch: ArchSpec) -> SourceUnit:
        """The translation unit of a valid configuration.

        Raises ``ConfigInvalidError`` or, if this arch has no template yet, ``UnsupportedError``.
        """
        ...

    def plan(self, problem: P, config: C, device: DeviceInfo) -> ExecutionPlan:
        """The stages that compute ``problem`` with ``config`` as the main kernel."""
        ...

    def predict(self, problem: P, config: C, device: DeviceInfo) -> Prediction:
        """Deterministic analytic estimate of the plan's device time."""
        ...

    def features(self, problem: P, config: C, device: DeviceInfo) -> Mapping[str, float]:
        """Inputs of a learned model, under stable names."""
        ...

    def reference(self, problem: P, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The truth, in NumPy float64 (exact integers for integer problems), readable rather than fast.

        Outputs are not rounded to their dtype.
        """
        ...

    def samples(self) -> Iterable[OperationRequest]:
        """A few small requests that the conformance test plans, builds, runs and compares with ``reference``."""
        ...
