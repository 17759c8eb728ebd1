"""Requests as JSON, for journals and bundles."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["request_from_dict", "request_to_dict"]


def request_to_dict(request: OperationRequest) -> dict[str, Any]:
    """A request as JSON. Numbers that JSON has not are objects: ``{"float": "inf"}``."""
    return {
        "operation": request.operation,
        "inputs": {name: desc.to_dict() for name, desc in request.inputs.items()},
        "outputs": {name: desc.to_dict() for name, desc in request.outputs.items()},
        "attributes": {name: _plain(value) for name, value in request.attributes.items()},
    }


def request_from_dict(record: Any) -> OperationRequest:
    """The inverse of ``request_to_dict``. Raises ``InvalidArgumentError`` that names the damaged entry."""
    if not isinstance(record, Mapping):
        raise _damaged("request", record, "an object")
    operation = record.get("operation")
    if not isinstance(operation, str) or not operation:
        raise _damaged("operation", operation, "the name of an operation")
    parts = {}
    for part in ("inputs", "outputs", "attributes"):
        parts[part] = record.get(part, {})
        if not isinstance(parts[part], Mapping):
            raise _damaged(part, parts[part], "an object")
    return OperationRequest(
        operation,
        {str(name): TensorDesc.from_dict(item) for name, item in parts["inputs"].items()},
        {str(name): TensorDesc.from_dict(item) for name, item in parts["outputs"].items()},
        {str(name): _attribute(str(name), item) for name, item in parts["attributes"].items()},
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _attribute(name: str, value: Any) -> Attribute:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and value.get("float") in ("inf", "-inf", "nan"):
        return float(value["float"])
    if isinstance(value, list):
        items = tuple(_attribute(name, item) for item in value)
        for kind in (int, float, str):
            if all(type(item) is kind for item in items):
                return items  # type: ignore[return-value]
    raise _damaged(f"attributes.{name}", value, "a number, a text, a truth value, or a list of one of them")


def _damaged(field: str, value: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"a recorded request is damaged: {field} is not {expected}",
        field=field,
        value=value if isinstance(value, str) else json.dumps(value, default=str),
        rule="request_record",
        fix="record it again",
    )
