"""Optional abilities of an operation, each a protocol that commands and the server ask for with ``isinstance``.

An operation has an ability by having its members; nothing is registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.records import ReadsForeignConfigs
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.declaration import Declaration
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.types.dtypes import DType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = [
    "Analyzable",
    "ChecksValues",
    "Declared",
    "GeneratesSets",
    "HasVariants",
    "NamesFields",
    "Product",
    "ReadsForeignConfigs",
    "RejectsDevices",
    "Resizes",
    "RowInvariant",
    "SamplesInputs",
    "Searchable",
    "Tunable",
    "WorkShare",
]


@dataclass(frozen=True, slots=True)
class Product:
    """A problem as the matrix products that its kernels compute, for static analysis."""

    m: int
    n: int
    k: int
    batch: int
    """Products of that size."""
    dtype: DType
    """Element type of the first operand, whose peak rate counts."""
    dtype_out: DType
    bytes_in: int
    """Bytes of all operands in memory, each once."""
    bytes_out: int


@dataclass(frozen=True, slots=True)
class WorkShare:
    """One kernel's division of a problem among workgroups, for static analysis."""

    slices: int
    """Units of work that go through the main loop, all of them together; a persistent kernel's workgroup takes some."""
    flops: float
    """FLOP of the products of a slice, what lies beyond the problem's edges included; of unequal slices the mean."""
    useful_flops: float
    """FLOP of the whole problem, without what lies beyond its edges."""
    bytes_begin: int
    """Bytes that a slice needs from memory before its first product."""
    bytes_end: int
    """Bytes that a slice stores after its last one."""
    turn_flops: float = 0.0
    """FLOP of the products of one turn of the main loop, where it has loops inside that multiply; 0: it has none."""
    cut: float = 0.0
    """Share of the turns in which not all of the products count (a mask or an end cuts them), for kernels that have a
    loop of its own for the others: 0 to 1."""

    @property
    def edge(self) -> float:
        """Share of the computed FLOP that lies inside the problem: 0 to 1."""
        return self.useful_flops / (self.slices * self.flops)


@runtime_checkable
class Tunable(Protocol):
    """Has kernel sets for tuning: spaces in which no kernel is looked up by name."""

    spaces: Mapping[str, KernelSet[Any]]


@runtime_checkable
class Declared(Protocol):
    """Declares its operands and attributes, for clients that ask and for the reference page."""

    declaration: Declaration


@runtime_checkable
class Searchable(Protocol):
    """Has a wide space of kernels, which oracles time and learned models choose from.

    Kernels stand in tables of numbers, one array for each trait, so that all of them are judged at a time. Trainer and
    planner take features from the same method. Methods are deterministic and thread-safe.
    """

    feature_names: Sequence[str]
    """Names of the features in their order; a model is used only with the names that it was trained with."""

    def search_class(self, problem: Any, device: DeviceInfo) -> str:
        """Name of the kind of problem whose kernels are the same but for their signature; empty: no wide space."""
        ...

    def search_space(self, problem: Any, device: DeviceInfo) -> Sequence[Any]:
        """Every valid configuration of the class, without fused steps, in a fixed order. It takes seconds."""
        ...

    def search_has(self, config: Any, device: DeviceInfo) -> bool:
        """True if a configuration, of the space or not, has the traits that tables hold."""
        ...

    def search_table(self, configs: Sequence[Any], device: DeviceInfo) -> Mapping[str, Array]:
        """Traits of configurations as arrays of equal lengths."""
        ...

    def search_times(self, problem: Any, table: Mapping[str, Array], device: DeviceInfo) -> Array:
        """Analytical seconds of every row; infinite for kernels that cannot win on the problem."""
        ...

    def search_features(self, problem: Any, table: Mapping[str, Array], device: DeviceInfo) -> Array:
        """Features of every row as float32, one column for each of ``feature_names``."""
        ...

    def search_config(self, problem: Any, table: Mapping[str, Array], row: int, device: DeviceInfo) -> Any:
        """The configuration of a row, with the problem's signature; rules and problem have still to allow it."""
        ...


@runtime_checkable
class RejectsDevices(Protocol):
    """Knows why it has nothing at all for a device."""

    def refusal(self, problem: Any, device: DeviceInfo) -> Violation | None:
        """The reason; None if there are kernels for the device."""
        ...


@runtime_checkable
class ChecksValues(Protocol):
    """Checks the content of operands that must make sense: lengths, indices."""

    def value_operands(self, problem: Any) -> Sequence[str]:
        """Names of the operands to check."""
        ...

    def check_values(self, problem: Any, values: Mapping[str, Array]) -> None:
        """Raise ``InvalidArgumentError`` for content that makes no sense.

        The server calls it before every launch, with those of the operands whose memory it can read: it should take a
        few microseconds.
        """
        ...


@runtime_checkable
class Resizes(Protocol):
    """Makes problems of the same kind with other sizes, for which strategies compare the model with measurements."""

    def resized(self, problem: Any, sizes: Mapping[str, int]) -> Any | None:
        """The problem with sizes as ``Problem.describe`` names them; None if they make none of this kind."""
        ...


@runtime_checkable
class RowInvariant(Protocol):
    """Has rows whose results do not depend on one another, and knows which kernels add up each row's products in an
    order that follows from the configuration and the other sizes alone.
    """

    def row_sizes(self, problem: Any) -> Sequence[str]:
        """Names, as ``Problem.describe`` gives them, of the sizes that count rows, the one that varies most first;
        empty if rows depend on one another.
        """
        ...

    def keeps_order(self, config: Any, device: DeviceInfo) -> bool:
        """True if the order of a row's sums does not depend on how many rows there are."""
        ...


@runtime_checkable
class SamplesInputs(Protocol):
    """Draws inputs of its samples that must make sense."""

    def sample_inputs(self, request: OperationRequest, rng: np.random.Generator) -> Mapping[str, Array]:
        """Content by name, for some or all inputs of one of its ``samples``."""
        ...


@runtime_checkable
class GeneratesSets(Protocol):
    """Selects kernels by options of its own, for ``kernels generate``."""

    generate_options: Sequence[str]
    """Names of the options."""

    def select_set(self, arch: ArchSpec, **options: Any) -> Sequence[KernelConfig]:
        """Valid kernels that the options select. Raises ``InvalidArgumentError`` and ``NotFoundError``."""
        ...


@runtime_checkable
class NamesFields(Protocol):
    """Knows further names of its configurations' fields, as other generators write them."""

    field_names: Mapping[str, str]
    """Field by further name."""


@runtime_checkable
class HasVariants(Protocol):
    """Has further spellings of operations."""

    variants: Mapping[str, str]
    """Operation by spelling."""


@runtime_checkable
class Analyzable(Protocol):
    """Computes products of matrices, so that ``kernels analyze`` can say what bounds its kernels."""

    def analysis_shape(self, config: Any) -> str:
        """Text of a usual problem of the kernel."""
        ...

    def analysis_request(self, config: Any, shape: str) -> OperationRequest:
        """The request that such a text means. Raises ``InvalidArgumentError``."""
        ...

    def product_of(self, problem: Any) -> Product:
        """The product that a problem is."""
        ...

    def share_of(self, problem: Any, config: Any, workgroups: int) -> WorkShare:
        """The kernel's division of the problem among so many workgroups, those of its launch."""
        ...
