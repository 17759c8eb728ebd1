"""`tilewright kernels explain attention`: which kernel attention or its gradients would run, and why."""

from __future__ import annotations

from typing import Any

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import attention_cases as a
from tilewright_tools.cli.problems.conv_cases import specs
from tilewright_tools.cli.problems.explaining import Question, explained

__all__ = ["EPILOG", "explain_attention"]

EPILOG = examples(
    "tilewright kernels explain attention 1 16 2048 128 --causal --dtype bf16",
    "tilewright kernels explain attention 8 32 8192 128 --heads-k 8 --queries 1 --paged 64 --json",
)


@explained(a.arguments)
def explain_attention(given: dict[str, Any]) -> Question:
    """Say which kernel attention would run, what was predicted of the others, and why the rest was refused."""
    case = a.case_of(**given)
    _, _, request = a.load(case)
    return Question(case.operation, specs(request), request.attributes)
