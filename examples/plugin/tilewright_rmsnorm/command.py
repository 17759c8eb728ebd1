"""The command that the entry point ``tilewright.commands`` names; imports nothing heavy at its top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.commands.parameters import argument
from tilewright_kit.commands.problem_command import Example, ProblemCommand

if TYPE_CHECKING:
    from tilewright_kit.commands.cases import CaseFamily
    from tilewright_rmsnorm.cases import RmsNormCase

__all__ = ["COMMAND"]


class RmsNormCommand(ProblemCommand):
    name = "rmsnorm"
    noun = "a normalisation"
    examples: Mapping[str, Sequence[str]] = {
        "run": ("128 4096 --validate",),
        "explain": ("128 4096",),
        "bench": ("--shapes 128x4096",),
    }
    problem = (argument("rows", int, "Rows of x."), argument("columns", int, "Elements of a row."))
    shapes = "Comma-separated: files with rows and columns, the list tiny, or shapes such as 128x4096."

    def family(self) -> CaseFamily:
        from tilewright_rmsnorm.cases import FAMILY

        return FAMILY

    def case(self, given: Mapping[str, Any]) -> RmsNormCase:
        from tilewright_kit.commands.cases import check_positive
        from tilewright_rmsnorm.cases import RmsNormCase

        case = RmsNormCase(**given)
        check_positive(case, "the command line", ("rows", "columns"))
        return case

    def describe(self, case: RmsNormCase) -> Mapping[str, Any]:
        return case.to_dict()

    def demonstrated(self, size: int) -> Sequence[Example]:
        return [Example("rmsnorm fp32", self.case({"rows": 128, "columns": size}))]

    def numpy_call(self, case: RmsNormCase, inputs: Mapping[str, Any]) -> Callable[[], object]:
        import numpy as np

        x, weight = inputs["x"], inputs["weight"]
        return lambda: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(1e-6)) * weight


COMMAND = RmsNormCommand()
