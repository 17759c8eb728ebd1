"""Settings from their sources: defaults, the settings file, the environment, flags. The only modules that read the
environment are this one and ``hosting/settings.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.settings.table import ENV_PREFIX, TABLE, Setting, Settings
from tilewright_server.settings.values import read_file

__all__ = ["default_cache_dir", "default_listen", "default_perf_database", "listen_of_environment", "load"]


def load(
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from ``file`` (else the file that ``TILEWRIGHT_CONFIG`` names), the environment and ``flags`` (``None``
    values are skipped).

    Raises ``InvalidArgumentError`` that names the source of a bad or unknown setting, ``NotFoundError`` if the file is
    missing.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(ENV_PREFIX + "CONFIG", "")
    path = file or (Path(named) if named else None)
    values: dict[str, Any] = {}
    if path is not None:
        values |= _checked(read_file(path), lambda row: f"{row.name} in the settings file")
    from_env = {row.name: environ[row.env] for row in TABLE if environ.get(row.env)}
    values |= _checked(from_env, lambda row: row.env)
    values |= _checked({key: value for key, value in (flags or {}).items() if value is not None}, lambda row: row.flag)
    if not values.get("listen"):
        values["listen"] = (default_listen(environ),)
    if values.get("cache_dir") is None:
        values["cache_dir"] = default_cache_dir()
    if values.get("perf_database") is None:
        values["perf_database"] = default_perf_database()
    if values.get("selection_lock") is None:
        values["selection_lock"] = values["perf_database"].with_name("selection.lock")
    return Settings(**values)


def default_listen(environ: Mapping[str, str] | None = None) -> str:
    """The user's own socket: in the runtime directory that the login session made, else in a private folder of /tmp."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return f"unix:{runtime}/tilewright/tilewright.sock"
    return f"unix:/tmp/tilewright-{os.getuid()}/tilewright.sock"


def listen_of_environment(environ: Mapping[str, str] | None = None) -> str:
    """The first address of ``TILEWRIGHT_LISTEN``; empty if that is not set."""
    environ = os.environ if environ is None else environ
    return environ.get(ENV_PREFIX + "LISTEN", "").split(",")[0].strip()


def default_cache_dir() -> Path:
    """Where compiled kernels live if no setting says otherwise."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("tilewright", appauthor=False))


def default_perf_database() -> Path:
    """Where measurements are kept if no setting says otherwise."""
    import platformdirs

    return Path(platformdirs.user_data_dir("tilewright", appauthor=False)) / "perf.sqlite"


def _checked(values: Mapping[str, Any], source: Callable[[Setting], str]) -> dict[str, Any]:
    rows = {row.name: row for row in TABLE}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        row = rows.get(name)
        if row is None:
            raise InvalidArgumentError(
                "there is no such setting",
                field=name,
                value=value,
                rule="settings",
                fix="use one of " + ", ".join(rows),
            )
        try:
            checked[name] = row.parse(value)
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"{source(row)} is not a {row.kind}: {error}", field=name, value=value, rule="settings", fix=row.doc
            ) from error
    return checked
