"""Configurations that users hand over: as a file, as text, or on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["read_config"]


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
