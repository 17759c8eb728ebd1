"""The contract of an operation, which every plugin implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Problem
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.kernel_sets.declare import KernelSet

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["Candidates", "Operation", "Prediction", "predictions_of"]

P = TypeVar("P", bound=Problem)
C = TypeVar("C", bound=KernelConfig)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time that a cost model expects of a kernel on a problem; ``parts`` are its parts by name, in seconds."""

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Candidates(tuple[C, ...]):
    """Configurations in the operation's order, with the predictions that were made to shorten the list.

    ``predictions`` stand in the same order, None where none was made. Strategies that predict take them from here, so
    that no kernel is predicted twice for one plan.
    """

    predictions: tuple[Prediction | None, ...]

    def __new__(cls, configs: Iterable[C], predictions: Iterable[Prediction | None] = ()) -> Candidates[C]:
        made = super().__new__(cls, tuple(configs))
        made.predictions = tuple(predictions) or (None,) * len(made)
        if len(made.predictions) != len(made):
            raise ValueError(f"{len(made)} candidates have {len(made.predictions)} predictions")
        return made

    def kept(self, usable: Callable[[C], bool]) -> Candidates[C]:
        """The candidates that are usable."""
        pairs = [(config, made) for config, made in zip(self, self.predictions, strict=True) if usable(config)]
        return Candidates((config for config, _ in pairs), (made for _, made in pairs))


def predictions_of(candidates: Sequence[C]) -> dict[C, Prediction]:
    """The predictions that candidates came with; those of other sequences are still to be made."""
    known = zip(candidates, candidates.predictions, strict=True) if isinstance(candidates, Candidates) else ()
    return {config: prediction for config, prediction in known if prediction is not None}


class Operation(Protocol[P, C]):
    """One operation. Implementations are stateless and thread-safe; no method touches a device or a compiler.

    Optional abilities are protocols of their own: ``tilewright_kit.contract.abilities``.
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

        ``Candidates`` carry the predictions that were made on the way. Where there is none the operation may raise
        ``UnsupportedError``, which names what there is.
        """
        ...

    def mismatches(self, problem: P, config: C, device: DeviceInfo) -> Sequence[Violation]:
        """Reasons why this kernel cannot compute this problem on this device; empty if it can."""
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

    def reference(self, problem: P, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The truth, in NumPy float64 (exact integers for integer problems), readable rather than fast.

        Outputs are not rounded to their dtype.
        """
        ...

    def samples(self) -> Iterable[OperationRequest]:
        """A few small requests that the conformance test plans, builds, runs and compares with ``reference``."""
        ...
