"""Configurations and catalogs that users hand over: files, text or standard input, in our fields or in another form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright_tools.cli.problems.loading import Loaded

__all__ = ["configuration", "configurations", "fields_of", "read_config", "read_json"]


def read_config(text: str) -> dict[str, Any]:
    """A configuration from a file, from standard input (``-``) or from the text itself."""
    record = read_json(text)
    if not isinstance(record, dict):
        raise _refused(
            "a configuration is a JSON object",
            text,
            'give an object of fields and values, for example {"pipeline": "compv4"}',
        )
    return record


def configuration(text: str, operation: str) -> tuple[str, dict[str, Any]]:
    """The operation and the fields of a configuration that ``read_config`` reads. Without an operation it is the one
    that the configuration itself tells.

    Raises ``InvalidArgumentError``, ``NotFoundError``.
    """
    return _read_record(read_config(text), operation)


def configurations(text: str, operation: str) -> list[tuple[str, dict[str, Any], str]]:
    """Operation, fields and arch (empty: not told) of each kernel of an exported catalog, ours or that of Composable
    Kernel's dispatcher, of a list of configurations, or of one.

    Raises ``InvalidArgumentError``, which names the place of the entry, ``NotFoundError``.
    """
    from tilewright_kit.types.errors import InvalidArgumentError

    record = read_json(text)
    if isinstance(record, dict):
        entries = record["kernels"] if isinstance(record.get("kernels"), list) else [record]
    else:
        entries = record
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _refused("a catalog is a list of kernels", text, "give what `tilewright kernels export` writes")
    found = []
    for index, entry in enumerate(entries):
        try:
            name, fields = _read_record(entry, operation)
        except InvalidArgumentError as error:
            where = f"kernels[{index}]"
            raise InvalidArgumentError(
                f"{where}: {error.reason}",
                field=f"{where}.{error.field}",
                value=error.value,
                rule=error.rule,
                fix=error.fix,
            ) from None
        found.append((name, fields, str(entry.get("gfx_arch", entry.get("arch", "")))))
    return found


def fields_of(text: str, loaded: Loaded) -> dict[str, Any]:
    """The fields of a configuration for a problem, as they were given; one in another form is converted."""
    record = read_config(text)
    record.pop("operation", None)
    if record.keys() <= set(loaded.operation.config_type.field_names()):
        return record  # the server adds the signature
    return configuration(text, loaded.operation.name)[1]


def _read_record(record: dict[str, Any], operation: str) -> tuple[str, dict[str, Any]]:
    from tilewright_kit.config.records import config_of_record
    from tilewright_tools.cli.problems.loading import default_operation, installed_operations

    operations = installed_operations()
    try:
        config = config_of_record(record, operations, operation or ("" if record else default_operation()))
    except Exception as error:
        # The command line has a name for what is missing.
        if getattr(error, "rule", "") == "config_operation":
            error.fix = f"add --operation, with one of {', '.join(operations)}"  # type: ignore[attr-defined]
        raise
    return config.operation, config.to_dict()


def read_json(text: str) -> Any:
    """Content of a JSON file, JSON text, or standard input (``-``). Raises ``InvalidArgumentError``."""
    try:
        if text == "-":
            content = sys.stdin.read()
        else:
            content = text if text.lstrip().startswith(("{", "[")) else Path(text).read_text()
        return json.loads(content)
    except (OSError, json.JSONDecodeError) as error:
        raise _refused(
            f"the configuration cannot be read: {error}", text, "give a JSON file, JSON text, or - for standard input"
        ) from error


def _refused(reason: str, value: str, fix: str) -> Exception:
    from tilewright_kit.types.errors import InvalidArgumentError

    return InvalidArgumentError(reason, field="config", value=value, rule="json", fix=fix)
