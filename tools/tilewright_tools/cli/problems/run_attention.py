"""`tilewright run attention`: attention or its gradients on random data, timed, and checked if asked."""

from __future__ import annotations

from typing import Any

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import attention_cases as a
from tilewright_tools.cli.problems.cases import Check
from tilewright_tools.cli.problems.running import Job, ran

__all__ = ["EPILOG", "attention"]

EPILOG = examples(
    "tilewright run attention 2 8 128 64 --validate",
    "tilewright run attention 1 16 1024 128 --causal --dtype bf16",
    "tilewright run attention 1 32 8192 128 --heads-k 8 --queries 1 --paged 64 --dtype bf16    a step of decoding",
    "tilewright run attention 4 8 512 64 --varlen --mask bottom_right --validate",
    "tilewright run attention 2 8 256 64 --backward --causal --validate --json",
)


@ran(a.arguments)
def attention(given: dict[str, Any]) -> Job:
    """Attend with random queries to random keys and values, or compute the gradients of that."""
    case = a.case_of(**given)
    operation, problem, request = a.load(case)

    def check(inputs: dict[str, Any], outputs: dict[str, Any]) -> Check:
        return a.check(case, inputs, outputs, a.truth(operation, problem, inputs))

    words = {
        "batch": case.batch, "heads": case.heads, "heads_k": case.kv_heads, "queries": case.queries,
        "keys": case.seq_k, "D": case.hdim, "Dv": case.values, "mask": case.mask, "window": case.window,
        "varlen": case.is_varlen, "page": case.page, "direction": case.direction, "dtype": case.dtype,
        "layout": case.layout,
    }  # fmt: skip
    return Job(
        operation=case.operation,
        label=case.label,
        words=words,
        attributes=request.attributes,
        flops=case.flops,
        operands=lambda client, seed: a.operands(client, operation, request, seed),
        check=check,
    )
