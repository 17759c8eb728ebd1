"""Reference of all settings as a page for people."""

from __future__ import annotations

from tilewright_server.settings.table import MIB, TABLE, Setting

__all__ = ["reference_page"]


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


def _shown(row: Setting) -> str:
    if row.default in (None, "", ()):
        return ""
    if row.kind == "size":
        return f"{row.default // MIB} MiB"
    return f"`{str(row.default).lower() if row.kind == 'flag' else row.default}`"
