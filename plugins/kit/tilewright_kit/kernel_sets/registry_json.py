"""The JSON form of a registry.

``metadata{timestamp, registry_name, total_kernels, export_version}``, ``statistics{by_datatype, by_pipeline,
by_scheduler, by_layout, by_gfx_arch}`` (counts) and ``kernels[{name, identifier, signature{...}, algorithm{...},
gfx_arch}]``. Signature and algorithm are for readers; what is read back is our own addition to each kernel:
``operation``, the exact ``config``, its ``digest``, ``priority`` and ``origin``. The rest must agree with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import KernelKey
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["EXPORT_VERSION", "Record", "read_registry", "registry_to_dict"]

EXPORT_VERSION = "1.0.0"
STATISTICS = ("by_datatype", "by_pipeline", "by_scheduler", "by_layout", "by_gfx_arch")
PRIORITIES = ("low", "normal", "high")


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of a registry, as it is exported."""

    key: KernelKey
    config: KernelConfig
    priority: str
    origin: str


def registry_to_dict(name: str, records: Sequence[Record], now: datetime | None = None) -> dict[str, Any]:
    """The document, in the order of ``records``; ``now`` is the time stamp (default: the present, UTC)."""
    moment = (now or datetime.now(timezone.utc)).astimezone(timezone.utc)
    return {
        "metadata": {
            "timestamp": moment.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "registry_name": name,
            "total_kernels": len(records),
            "export_version": EXPORT_VERSION,
        },
        "statistics": _statistics(records),
        "kernels": [_kernel(record) for record in records],
    }


def _statistics(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {group: {} for group in STATISTICS}
    for record in records:
        for group, value in (record.config.statistics() | {"by_gfx_arch": record.key.arch}).items():
            group_counts = counts.setdefault(group, {})
            group_counts[value] = group_counts.get(value, 0) + 1
    return {group: dict(sorted(values.items())) for group, values in counts.items()}


def _kernel(record: Record) -> dict[str, Any]:
    return {
        "name": record.key.name,
        "identifier": str(record.key),
        "signature": record.config.signature(),
        "algorithm": record.config.algorithm(),
        "gfx_arch": record.key.arch,
        "operation": record.key.operation,
        "config": record.config.to_dict(),
        "digest": record.key.digest,
        "priority": record.priority,
        "origin": record.origin,
    }


def read_registry(
    source: Path | str | Mapping[str, Any], operations: Mapping[str, type[KernelConfig]]
) -> tuple[Record, ...]:
    """All entries of a document, or of the file that holds it. Raises ``InvalidArgumentError`` on any damage."""
    document = _load(source) if isinstance(source, (str, Path)) else source
    metadata = _get(document, "metadata", dict, "")
    if metadata.get("export_version") != EXPORT_VERSION:
        _damaged("metadata.export_version", metadata.get("export_version"), f"{EXPORT_VERSION!r}")
    kernels = _get(document, "kernels", list, "")
    if not _same(metadata.get("total_kernels"), len(kernels)):
        _damaged("metadata.total_kernels", metadata.get("total_kernels"), f"{len(kernels)}, the number of kernels")
    records: dict[KernelKey, Record] = {}
    for index, kernel in enumerate(kernels):
        where = f"kernels[{index}]"
        record = _read_kernel(kernel, where, operations)
        if record.key in records:
            _damaged(f"{where}.identifier", str(record.key), "a kernel that is not listed twice")
        records[record.key] = record
    return tuple(records.values())


def _read_kernel(kernel: Any, where: str, operations: Mapping[str, type[KernelConfig]]) -> Record:
    operation = _get(kernel, "operation", str, where)
    if operation not in operations:
        _damaged(f"{where}.operation", operation, f"one of {', '.join(sorted(operations)) or 'no operations'}")
    arch = _get(kernel, "gfx_arch", str, where)
    if not arch:
        _damaged(f"{where}.gfx_arch", arch, "the id of an arch")
    priority = _get(kernel, "priority", str, where)
    if priority not in PRIORITIES:
        _damaged(f"{where}.priority", priority, f"one of {', '.join(PRIORITIES)}")
    config = _read_config(_get(kernel, "config", dict, where), f"{where}.config", operations[operation])
    record = Record(config.key(arch), config, priority, _get(kernel, "origin", str, where))
    # A file in which somebody changed one half only must not be read as either half.
    for name, expected in _kernel(record).items():
        if not _same(kernel.get(name), expected):
            _damaged(f"{where}.{name}", kernel.get(name), f"{expected!r}, which is what its config gives")
    return record


def _same(one: Any, other: Any) -> bool:
    # As JSON, because to Python 1, 1.0 and True are equal.
    return json.dumps(one, sort_keys=True, default=repr) == json.dumps(other, sort_keys=True)


def _read_config(record: dict[str, Any], where: str, config_type: type[KernelConfig]) -> KernelConfig:
    missing = sorted(set(config_type.field_names()) - set(record))
    if missing:
        _damaged(f"{where}.{missing[0]}", None, "a value")
    try:
        return config_type.from_dict(record)
    except InvalidArgumentError as error:
        field = where + error.field.removeprefix("config")
        raise InvalidArgumentError(
            error.reason, field=field, value=error.value, rule="registry_record", fix=error.fix
        ) from None


def _load(path: Path | str) -> Any:
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8"))
    except OSError as error:
        raise InvalidArgumentError(
            f"the registry cannot be read: {error.strerror}", field="path", value=str(path), rule="registry_file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the registry is not JSON: {error}", field="path", value=str(path), rule="registry_file"
        ) from None


def _get(record: Any, name: str, kind: type[Any], where: str) -> Any:
    if not isinstance(record, Mapping):
        _damaged(where or "registry", record, "an object")
    value = record.get(name)
    if not isinstance(value, kind):
        _damaged(f"{where}.{name}" if where else name, value, kind.__name__)
    return value


def _damaged(field: str, value: object, expected: str) -> NoReturn:
    raise InvalidArgumentError(f"{field}: expected {expected}", field=field, value=value, rule="registry_record")
