"""The names of a request's tensors, sorted into groups."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tilewright_gemm.problem.attributes import MAX_GROUPS, refuse
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import check_tensor
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["Group", "check_tensor", "read_groups"]

_NAME = re.compile(r"(a|b|c|d|bias|scale_a|scale_b|out)((?:\[(?:0|[1-9][0-9]{0,5})\])*)")
"""Numbers have one spelling, so that two names cannot mean one operand."""
_INPUTS = "a, b, bias, c, d[0], d[1], ..., scale_a, scale_b"


@dataclass(slots=True)
class Group:
    """The operands of one product, as they were named."""

    inputs: dict[str, tuple[str, TensorDesc]] = field(default_factory=dict)
    d: dict[int, tuple[str, TensorDesc]] = field(default_factory=dict)
    out: tuple[str, TensorDesc] | None = None


def read_groups(request: OperationRequest, asked: int) -> tuple[list[Group], bool]:
    """The request's tensors by group; whether the caller named them as groups (``a[0]``, ``a[1]``, ...)."""
    for name, desc in (*request.inputs.items(), *request.outputs.items()):
        check_tensor(name, desc)
    grouped = asked > 0 or "a[0]" in request.inputs
    groups: dict[int, Group] = {}
    for name, desc in request.inputs.items():
        base, numbers = _split_name(name, grouped)
        if base == "out":
            raise _unknown_operand(name, grouped)
        group = groups.setdefault(numbers[0] if grouped else 0, Group())
        if base == "d":
            group.d[numbers[-1]] = (name, desc)
        else:
            group.inputs[base] = (name, desc)
    for name, desc in request.outputs.items():
        base, numbers = _split_name(name, grouped)
        if base != "out":
            raise refuse(
                f"GEMM has no output {name!r}",
                name,
                name,
                "operand_known",
                "the output is named out (out[0], ... if grouped)",
            )
        groups.setdefault(numbers[0] if grouped else 0, Group()).out = (name, desc)
    count = asked or max(len(groups), 1)
    if count > MAX_GROUPS:
        raise refuse(
            f"at most {MAX_GROUPS} groups fit in a call",
            "attributes.groups",
            count,
            "group_count",
            "make several calls",
        )
    if sorted(groups) != list(range(count)):
        missing = next((index for index in range(count) if index not in groups), None)
        raise refuse(
            f"{count} groups are asked for, but the operands name others"
            if missing is None
            else f"group {missing} has no operands",
            "attributes.groups",
            asked or len(groups),
            "group_count",
            f"number the operands a[0] to a[{count - 1}] without gaps, and likewise b and out",
        )
    return [groups[index] for index in range(count)], grouped


def _split_name(name: str, grouped: bool) -> tuple[str, list[int]]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise _unknown_operand(name, grouped)
    numbers = [int(number) for number in re.findall("[0-9]+", match[2])]
    if len(numbers) != grouped + (match[1] == "d"):
        raise _unknown_operand(name, grouped)
    return match[1], numbers


def _unknown_operand(name: object, grouped: bool) -> InvalidArgumentError:
    form = "a[g], b[g], bias[g], c[g], d[g][i], scale_a[g], scale_b[g] for group g" if grouped else _INPUTS
    return refuse(f"GEMM has no input {name!r}", str(name), name, "operand_known", f"the inputs are {form}")
