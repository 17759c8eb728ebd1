"""The declaration by which an operation appears in the commands about problems: ``run``, ``explain``,
``bench``, ``kernels generate`` and ``demo``.

A distribution names its declarations as entry points of the group ``tilewright.commands``. Their modules import nothing
heavy: help texts and completion read them. Methods import what they need when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright_kit.commands.parameters import Parameter

if TYPE_CHECKING:
    import numpy.typing as npt

    from tilewright_kit.commands.cases import Case, CaseFamily
    from tilewright_kit.contract.problem import Attribute

    Array = npt.NDArray[Any]

__all__ = ["ENTRY_POINT_GROUP", "Example", "Preparation", "ProblemCommand"]

ENTRY_POINT_GROUP = "tilewright.commands"


@dataclass(frozen=True, slots=True)
class Preparation:
    """An operation whose output takes an operand's place, made once: weights packed ahead of time."""

    operation: str
    operand: str
    """Its input."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Example:
    """One row of the demonstration."""

    title: str
    case: Case
    """A device that does not prepare an operand of it (``ProblemCommand.prepared``) gets the operand as it is."""


class ProblemCommand(ABC):
    """The problems of an operation, or of a family of operations, as users name them."""

    name: str
    """Word on the command line."""
    rank: int = 100
    """Place among the commands; the first is the default where an operation may be left out."""
    noun: str
    """A problem, for the help texts: ``a product``."""
    examples: Mapping[str, Sequence[str]]
    """Arguments by command (``run``, ``explain``, ``bench``): each is shown behind the command and ``name``."""
    problem: Sequence[Parameter]
    """Parameters that say which problem it is: of ``run`` and ``explain``."""
    steps: Sequence[Parameter] = ()
    """Fused steps, and ways to split: further parameters of ``run`` and ``explain``. Those that are
    columns of its cases are options of ``bench`` as well."""
    columns: Sequence[Parameter] = ()
    """Options of ``bench``: values, comma-separated, of rows that leave the column of that name out."""
    replaced: Mapping[str, str] = {}
    """Options of ``bench`` beside them whose number, unless it is 0, replaces a column: ``batch`` to its column."""
    replaced_help: str = ""
    shapes: str
    """Words for ``bench --shapes``: columns of files, built-in lists, how a shape is written."""
    generated: Sequence[Parameter] = ()
    """Options of ``kernels generate`` that only its operations know."""

    @abstractmethod
    def family(self) -> CaseFamily:
        """Cases as rows of files, and how large results are checked."""

    @abstractmethod
    def case(self, given: Mapping[str, Any]) -> Case:
        """The case that the values of ``problem`` and ``steps`` mean; ``steps`` may be missing.

        Raises ``InvalidArgumentError`` whose field is ``shapes.COLUMN``.
        """

    @abstractmethod
    def describe(self, case: Any) -> Mapping[str, Any]:
        """The problem for programs, under stable names."""

    def prepared(self, case: Any) -> Mapping[str, Preparation]:  # noqa: ARG002
        """Operands of a case that are prepared before they are used, by name; none by default."""
        return {}

    def screen(self, case: Any) -> None:  # noqa: B027 (most have nothing to add)
        """Raise an error in better terms than the operation itself has for this case; nothing by default."""

    def compared(self, case: Any, inputs: Mapping[str, Array], name: str, output: Array) -> Array:  # noqa: ARG002
        """The part of an output that the operation defines; all of it by default."""
        return output

    def least_tolerance(self, case: Any) -> float:  # noqa: ARG002
        """Relative error that results may always have, beside the roundings that are derived; 0 by default."""
        return 0.0

    def shown_kernel(self, kernels: Sequence[str]) -> str:
        """The main kernel of a plan: the last by default."""
        return kernels[-1] if kernels else ""

    def demonstrated(self, size: int) -> Sequence[Example]:  # noqa: ARG002
        """Rows of the demonstration; ``size`` is what the user chose for square problems."""
        return ()

    def numpy_call(self, case: Any, inputs: Mapping[str, Array]) -> Callable[[], object] | None:  # noqa: ARG002
        """The same in float32 NumPy, as fast as it goes there; none if it has nothing alike."""
        return None

    def generate_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``select_set`` from values of ``generated``; those that were not given are left out."""
        return {item.name: given[item.name] for item in self.generated if given[item.name] not in (None, "", [], ())}
