"""Families of cases by operation, from the commands that plugins declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_kit.commands.cases import Case, CaseFamily
from tilewright_kit.commands.discovery import command_of, installed_commands

__all__ = ["family_named", "family_of", "stored_case"]


def family_named(name: str) -> CaseFamily:
    """The family that a case names (``Case.family``)."""
    return installed_commands()[name].family()


def family_of(operation: str) -> CaseFamily:
    """The family of an operation's cases. Raises ``NotFoundError`` if no installed command knows the operation."""
    return command_of(operation).family()


def stored_case(record: Mapping[str, Any], where: str, operation: str) -> Case:
    """The case of a row that a sweep wrote; its other columns are left aside."""
    family = family_of(operation)
    columns = family.case_type.__dataclass_fields__
    return family.from_record({name: record[name] for name in columns if name in record}, where)
