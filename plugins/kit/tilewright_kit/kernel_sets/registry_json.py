"""The JSON form of a registry.

``metadata{timestamp, registry_name, total_kernels, export_version}``, ``statistics{by_datatype, by_pipeline,
by_scheduler, by_layout, by_gfx_arch}`` (counts) and ``kernels[{name, identifier, signature{...}, algorithm{...},
gfx_arch}]``. Signature and algorithm are for readers; our own additions to each kernel are ``operation``, the
exact ``config``, which ``tilewright kernels import`` reads, its ``digest``, ``priority`` and ``origin``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import KernelKey

__all__ = ["EXPORT_VERSION", "Record", "registry_to_dict"]

EXPORT_VERSION = "1.0.0"
STATISTICS = ("by_datatype", "by_pipeline", "by_scheduler", "by_layout", "by_gfx_arch")


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
