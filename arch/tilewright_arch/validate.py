"""Checking a spec against ``schema.json``. Needs the ``jsonschema`` package; loading does not."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import SpecError
from .loader import resolve

_PACKAGE = __name__.rpartition(".")[0]


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of an arch file with its includes merged."""
    text = (resources.files(_PACKAGE) / "schema.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def validate_spec(spec: Mapping[str, object] | Path | str) -> None:
    """Check a spec document, or the file at a path, against the schema.

    Raises ``SpecError`` naming the first offending field in document order, with all problems
    in its text, and ``ImportError`` where ``jsonschema`` is not installed.
    """
    try:
        jsonschema = importlib.import_module("jsonschema")
    except ImportError as error:
        raise ImportError("validate_spec needs the jsonschema package") from error
    document, source = resolve(Path(spec) if isinstance(spec, str) else spec)
    validator = jsonschema.Draft202012Validator(schema())
    problems = sorted(validator.iter_errors(document), key=lambda e: list(map(str, e.path)))
    if not problems:
        return
    text = "; ".join(f"{_field(p.path) or 'document'}: {p.message}" for p in problems)
    raise SpecError(source, _field(problems[0].path), text)


def _field(path: Iterable[str | int]) -> str:
    field = ""
    for part in path:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    return field.removeprefix(".")
