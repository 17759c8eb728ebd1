"""`tilewright kernels explain conv`: which kernel a convolution or gradient would run, and why."""

from __future__ import annotations

from typing import Any

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import conv_cases as c
from tilewright_tools.cli.problems.explaining import Question, explained

__all__ = ["EPILOG", "explain_conv"]

EPILOG = examples(
    "tilewright kernels explain conv 1 64 64 56x56 3x3 --padding 1",
    "tilewright kernels explain conv 32 256 256 14x14 3x3 --padding 1 --direction bwd_weight --dtype bf16 --json",
)


@explained(c.arguments)
def explain_conv(given: dict[str, Any]) -> Question:
    """Say which kernel a convolution would run, what was predicted of the others, and why the rest was refused."""
    case = c.case_of(**given)
    _, _, request = c.load(case)
    return Question(case.operation, c.specs(request), request.attributes)
