"""A kernel that the caller gives by its fields rather than by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.records import config_of_record
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError
from tilewright_server.engine.types import Selection
from tilewright_server.protocol.json_text import parsed

__all__ = ["given_config"]


def given_config(
    selection: Selection, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo
) -> KernelConfig:
    """The kernel of ``selection.config``. Fields of its signature that are left out follow from the problem.

    Raises ``InvalidArgumentError`` for what is no object of the operation's fields, and for a kernel that is named as
    well.
    """
    if selection.kernel or selection.strategy not in ("", "explicit"):
        field = "kernel" if selection.kernel else "strategy"
        raise InvalidArgumentError(
            f"a configuration and a {field} both choose the kernel",
            field=f"selection.{field}",
            value=selection.kernel or selection.strategy,
            rule="explicit_kernel",
            fix="leave one of them out",
        )
    try:
        record = parsed(selection.config)
    except (ValueError, RecursionError) as error:
        record = str(error)
    if not isinstance(record, Mapping):
        raise InvalidArgumentError(
            "the configuration is not a JSON object",
            field="config",
            value=selection.config[:200],
            rule="config_json",
            fix='send an object of fields and values, for example {"pipeline": "compv4"}',
        )
    known = operation.config_type.field_names()
    if record.keys() <= set(known):
        record = _signature(operation, problem, device) | dict(record)
    return config_of_record(record, {operation.name: operation}, operation.name)


def _signature(operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> dict[str, Any]:
    """Fields of the signature on which all kernels for the problem agree."""
    try:
        candidates = operation.candidates(problem, device)
    except TilewrightError:  # nothing that is known computes it; the configuration may
        return {}
    records = [item.to_dict() for item in candidates]
    fields = operation.config_type.signature_fields
    return {name: records[0][name] for name in fields if all(item[name] == records[0][name] for item in records)}
