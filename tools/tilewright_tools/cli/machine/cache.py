"""`tilewright cache`: the folder of compiled kernels. Works on the folder itself, so no server has to run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import FullNames
from tilewright_tools.cli.console.output import examples, note, print_json, table
from tilewright_tools.cli.console.signing import KEY, SIGN, sign_file, trusted_keys

if TYPE_CHECKING:
    from tilewright_server.build.cache.artifacts import ArtifactCache

__all__ = ["app", "open_cache", "size_text"]

app = typer.Typer(
    help="The folder of compiled kernels, shared by all servers of one user.",
    no_args_is_help=True,
    epilog=examples(
        "tilewright cache list",
        "tilewright cache verify --repair",
        "tilewright cache prune --max-size 512MiB --max-age 30d",
        "tilewright cache export kernels.tar.gz",
    ),
)

_JSON = typer.Option(False, "--json", help="Print JSON.")
_DIR = typer.Option(None, "--cache-dir", help="The folder. Default: the one that the server uses.")
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command("list", epilog=examples("tilewright cache list", "tilewright cache list --json | jq '.[].name'"))
def list_entries(cache_dir: Path | None = _DIR, full_names: FullNames = False, as_json: bool = _JSON) -> None:
    """List the compiled kernels, most recently used first."""
    from tilewright_server.build.cache import maintenance

    entries = maintenance.list_entries(open_cache(cache_dir))
    if as_json:
        print_json(
            [
                {
                    "key": entry.key,
                    "name": entry.meta.name if entry.meta else None,
                    "arch": entry.meta.arch if entry.meta else None,
                    "compiler": entry.meta.compiler if entry.meta else None,
                    "build_ms": entry.meta.build_ns / 1e6 if entry.meta else None,
                    "bytes": entry.nbytes,
                    "last_used": entry.last_used,
                }
                for entry in entries
            ]
        )
        return
    rows = [
        (
            entry.key[:12],
            entry.meta.name if entry.meta else "(unreadable)",
            entry.meta.arch if entry.meta else "",
            f"{entry.meta.build_ns / 1e6:.0f}" if entry.meta else "",
            size_text(entry.nbytes),
            _ago(entry.last_used),
        )
        for entry in entries
    ]
    columns = ("key", "kernel", "arch", "built in ms", "size", "used")
    table("", columns, rows, right=("built in ms", "size"), full_names=full_names)
    note(f"{len(entries)} kernels, {size_text(sum(entry.nbytes for entry in entries))}")


@app.command("verify", epilog=examples("tilewright cache verify", "tilewright cache verify --repair"))
def verify(
    repair: bool = typer.Option(False, "--repair", help="Move damaged entries away; they are rebuilt when needed."),
    cache_dir: Path | None = _DIR,
    as_json: bool = _JSON,
) -> None:
    """Compare every entry with its digest; exit code 1 if one is damaged and stays."""
    from tilewright_server.build.cache import maintenance

    results = maintenance.verify(open_cache(cache_dir), repair=repair)
    damaged = [item for item in results if item.damage]
    if as_json:
        print_json([{"key": item.key, "name": item.name, "damage": item.damage} for item in results])
    else:
        if damaged:
            rows = [(item.key[:12], item.name, item.damage) for item in damaged]
            table("", ("key", "kernel", "damage"), rows)
        verb = "moved away" if repair else "damaged"
        note(f"{len(results)} entries read, {len(damaged)} {verb}")
    if damaged and not repair:
        raise typer.Exit(Exit.FAILED)


@app.command("prune", epilog=examples("tilewright cache prune --max-size 512MiB", "tilewright cache prune --all"))
def prune(
    max_size: str = typer.Option("", "--max-size", help="Keep at most this much, for example 512MiB."),
    max_age: str = typer.Option("", "--max-age", help="Remove what was not used for so long, for example 30d."),
    everything: bool = typer.Option(False, "--all", help="Remove everything that is not in use."),
    cache_dir: Path | None = _DIR,
    as_json: bool = _JSON,
) -> None:
    """Remove kernels that are old, then those used least recently. What is loaded or being built stays."""
    from tilewright_server.build.cache import maintenance

    result = maintenance.prune(
        open_cache(cache_dir),
        max_bytes=0 if everything else _bytes(max_size) if max_size else None,
        max_age_s=_age(max_age) if max_age else None,
    )
    if as_json:
        print_json({name: getattr(result, name) for name in ("removed", "freed_bytes", "kept", "kept_bytes", "in_use")})
        return
    note(
        f"{len(result.removed)} removed ({size_text(result.freed_bytes)}), "
        f"{result.kept} kept ({size_text(result.kept_bytes)}), {result.in_use} of them in use"
    )


@app.command(
    "export",
    epilog=examples("tilewright cache export kernels.tar.gz", "tilewright cache export kernels.tar.gz --sign key.pem"),
)
def export(
    archive: Path = typer.Argument(help="Tar archive to write; compressed if it ends in .gz or .tgz."),
    sign: Path | None = SIGN,
    cache_dir: Path | None = _DIR,
) -> None:
    """Write all kernels to an archive, for machines of the same kind."""
    from tilewright_server.build.cache import maintenance

    count = maintenance.export_entries(open_cache(cache_dir), archive)
    note(f"{count} kernels written to {archive}")
    sign_file(archive, sign)


@app.command(
    "import",
    epilog=examples("tilewright cache import kernels.tar.gz", "tilewright cache import kernels.tar.gz --key key.pub"),
)
def import_(
    archive: Path = typer.Argument(help="An archive that `tilewright cache export` wrote."),
    key: Path | None = KEY,
    cache_dir: Path | None = _DIR,
) -> None:
    """Add the kernels of an archive. They are code: import only what you would install."""
    from tilewright_server.build.cache import maintenance

    result = maintenance.import_entries(open_cache(cache_dir), archive, trusted_keys(key))
    note(f"{len(result.added)} kernels added, {len(result.present)} were there already")


def open_cache(cache_dir: Path | None) -> ArtifactCache:
    """The cache at ``cache_dir``, or where the server's settings say."""
    from tilewright_server import settings
    from tilewright_server.build.cache.artifacts import ArtifactCache

    found = settings.load({"cache_dir": cache_dir}).cache_dir
    assert found is not None, "settings.load always says where"
    return ArtifactCache(found)


def size_text(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in reversed(_AGES.items()):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def _bytes(text: str) -> int:
    return int(_number(text, {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "B": 1, "": 1}, "max_size"))


def _age(text: str) -> float:
    return _number(text, {**_AGES, "": 1}, "max_age")


def _number(text: str, units: dict[str, int], field: str) -> float:
    from tilewright_kit.types.errors import InvalidArgumentError

    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(digits) :].strip()
    try:
        if unit in units and float(digits) >= 0:
            return float(digits) * units[unit]
    except ValueError:
        pass
    allowed: Sequence[str] = [name for name in units if name]
    raise InvalidArgumentError(
        f"{text!r} cannot be read",
        field=field,
        value=text,
        rule="number_with_unit",
        fix=f"use a number and {', '.join(allowed)}",
    )
