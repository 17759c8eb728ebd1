"""Reference of all settings as a page for people."""

from __future__ import annotations

from tilewright_server.settings.rates import KIB, MIB
from tilewright_server.settings.table import TABLE, Setting

__all__ = ["default_text", "reference_page"]


def reference_page() -> str:
    """The table for people, as ``docs/settings.md``. ``python -m tilewright_server.settings`` writes it to stdout."""
    lines = [
        "# Settings",
        "",
        "A setting comes, in rising order of precedence, from its default, the settings file (TOML,",
        "`--config` or `TILEWRIGHT_CONFIG`), its environment variable, and its flag of `tilewright serve`. In",
        "the settings file its name is the first column. Generated from the table in",
        "`server/tilewright_server/settings/table.py`.",
        "",
        "| setting | environment variable | flag | default | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| `{row.name}` | `{row.env}` | `{row.flag}` | {_shown(row)} | {row.doc} |" for row in TABLE]
    return "\n".join(lines) + "\n"


def default_text(row: Setting) -> str:
    """The default of a setting for people; empty if there is none."""
    if row.default in (None, "", ()):
        return ""
    if row.kind == "flag":
        return str(row.default).lower()
    if row.kind == "size":
        return _size(row.default)
    if row.kind == "pair of sizes":
        return ", ".join(map(_size, row.default))
    if row.kind == "pair of numbers":
        return ", ".join(f"{number:.0f}" for number in row.default)
    return str(row.default)


def _shown(row: Setting) -> str:
    text = default_text(row)
    return text if not text or "size" in row.kind else f"`{text}`"


def _size(value: int) -> str:
    return f"{value // MIB} MiB" if value % MIB == 0 else f"{value // KIB} KiB"
