"""`tilewright plugins`: which plugins are installed, and whether they work."""

from __future__ import annotations

from typing import Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.output import examples, note, print_json, table

__all__ = ["EPILOG", "plugins"]

EPILOG = examples("tilewright plugins", "tilewright plugins --json")


def plugins(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List installed plugins with what they offer; exit code 1 if one does not load."""
    import logging

    from tilewright_kit.loading.loader import PluginManager

    # Failures are in the table; the log would say them twice.
    logging.getLogger("tilewright_kit.loading.loader").setLevel(logging.CRITICAL)
    manager = PluginManager()
    manager.load_entry_points()
    records: list[dict[str, Any]] = [
        {
            "name": item.name,
            "version": item.version,
            "distribution": item.distribution,
            "loaded": True,
            "operations": [operation.name for operation in item.operations],
            "devices": [device.kind for device in item.devices],
            "strategies": [strategy.name for strategy in item.strategies],
            "reason": "",
        }
        for item in manager.loaded
    ]
    records += [
        {
            "name": item.name,
            "version": item.version,
            "distribution": item.distribution,
            "loaded": False,
            "operations": [],
            "devices": [],
            "strategies": [],
            "reason": item.reason,
        }
        for item in manager.failures
    ]
    if as_json:
        print_json(records)
    else:
        rows = [
            (
                record["name"],
                record["version"],
                record["distribution"],
                "yes" if record["loaded"] else "no",
                _offers(record),
            )
            for record in records
        ]
        table("", ("name", "version", "distribution", "works", "offers"), rows)
        for item in manager.failures:
            note(f"{item.name}: {item.reason}")
    if manager.failures:
        raise typer.Exit(Exit.FAILED)


def _offers(record: dict[str, Any]) -> str:
    kinds = {"operations": "operation", "devices": "device", "strategies": "strategy"}
    return ", ".join(f"{word} {name}" for kind, word in kinds.items() for name in record[kind])
