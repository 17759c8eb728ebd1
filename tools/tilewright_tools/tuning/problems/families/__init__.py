"""What sweeps know of each operation: its problems as rows of files, checks of large results, what a peer runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_kit.types.errors import NotFoundError
from tilewright_tools.tuning.problems.cases import Case, CaseFamily
from tilewright_tools.tuning.problems.families.attention import ATTENTION
from tilewright_tools.tuning.problems.families.conv import CONV
from tilewright_tools.tuning.problems.families.gemm import GEMM

__all__ = ["FAMILIES", "family_of", "stored_case"]

FAMILIES: Mapping[str, CaseFamily] = {name: family for family in (GEMM, CONV, ATTENTION) for name in family.operations}
"""By operation."""


def family_of(operation: str) -> CaseFamily:
    """Raises ``NotFoundError`` for an operation that sweeps know nothing of."""
    if operation not in FAMILIES:
        raise NotFoundError(
            f"sweeps know no problems of {operation!r}",
            field="operation",
            value=operation,
            rule="family",
            fix=f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[operation]


def stored_case(record: Mapping[str, Any], where: str, operation: str) -> Case:
    """The case of a row that a sweep wrote; its other columns are left aside."""
    family = family_of(operation)
    columns = family.case_type.__dataclass_fields__
    return family.from_record({name: record[name] for name in columns if name in record}, where)
