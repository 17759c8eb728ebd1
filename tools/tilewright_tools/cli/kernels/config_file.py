"""Configurations that users hand over: as a file, as text, or on standard input; in our fields or in another form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["configuration", "read_config"]


def read_config(text: str) -> dict[str, Any]:
    """A configuration from a file, from standard input (``-``) or from the text itself."""
    from tilewright_kit.types.errors import InvalidArgumentError

    try:
        if text == "-":
            content = sys.stdin.read()
        else:
            content = text if text.lstrip().startswith("{") else Path(text).read_text()
        record = json.loads(content)
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidArgumentError(
            f"the configuration cannot be read: {error}",
            field="config",
            value=text,
            rule="json",
            fix="give a JSON file, JSON text, or - for standard input",
        ) from error
    if not isinstance(record, dict):
        raise InvalidArgumentError(
            "a configuration is a JSON object",
            field="config",
            value=text,
            rule="json",
            fix='give an object of fields and values, for example {"pipeline": "compv4"}',
        )
    return record


def configuration(text: str, operation: str) -> tuple[str, dict[str, Any]]:
    """The operation and the fields of a configuration that ``read_config`` reads. One in the form of another system is
    converted by the operation, or by another one of its plugin whose kernel it is.

    Raises ``InvalidArgumentError``, ``NotFoundError``.
    """
    from tilewright_kit.contract.abilities import ReadsForeignConfigs
    from tilewright_tools.cli.problems.loading import default_operation, installed_operations, load_operation

    name, record = operation or default_operation(), read_config(text)
    found = load_operation(name)
    if not isinstance(found, ReadsForeignConfigs) or not found.is_foreign(record):
        return name, record
    config = found.read_foreign(record)
    if type(config) is not found.config_type:
        others = (item.name for item in installed_operations().values() if item.config_type is type(config))
        name = next(others, name)
    return name, config.to_dict()
