"""`tilewright arch`: the architectures that kernels can be made for."""

from __future__ import annotations

import typer

from tilewright_tools.cli.console.output import examples, print_json, table

__all__ = ["app"]

app = typer.Typer(
    help="The architectures that kernels can be made for.",
    no_args_is_help=True,
    epilog=examples("tilewright arch list", "tilewright arch show gfx942 --json", "tilewright arch detect"),
)

_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command("list", epilog=examples("tilewright arch list", "tilewright arch list --kind hip --json"))
def list_archs(
    kind: str = typer.Option("", help="Only this kind: cpu, cuda or hip."),
    as_json: bool = _JSON,
) -> None:
    """List every architecture that has a spec."""
    import tilewright_arch as ta

    specs = [spec for spec in map(ta.load, ta.names()) if kind in ("", spec.kind)]
    if as_json:
        print_json([{"name": spec.name, "kind": spec.kind, "description": spec.description} for spec in specs])
        return
    rows = [
        (
            spec.name,
            spec.kind,
            spec.wave_size,
            spec.lds_bytes // 1024,
            ", ".join(spec.optional_features),
            spec.description,
        )
        for spec in specs
    ]
    columns = ("name", "kind", "wave", "LDS KiB", "optional features", "description")
    table("", columns, rows, right=("wave", "LDS KiB"))


@app.command("show", epilog=examples("tilewright arch show gfx942", "tilewright arch show x86-64-v4+bf16+vnni --json"))
def show(
    name: str = typer.Argument(help="Name, or name+feature+feature."),
    as_json: bool = _JSON,
) -> None:
    """Show the limits and tables of one architecture."""
    import tilewright_arch as ta

    _show(ta.load(name), as_json)


@app.command("detect", epilog=examples("tilewright arch detect", "tilewright arch detect --json | jq .id"))
def detect(as_json: bool = _JSON) -> None:
    """Say which architecture this machine's CPU is, with the features that it has."""
    import tilewright_arch as ta

    _show(ta.detect_cpu(), as_json)


def _show(spec: object, as_json: bool) -> None:
    record = spec.to_dict()  # type: ignore[attr-defined]
    if as_json:
        print_json(record)
        return
    rows = [(key, _text(value)) for key, value in record.items()]
    table("", ("field", "value"), rows)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_brief(item)}" for key, item in value.items())
    return _brief(value)


def _brief(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_brief(item)}" for key, item in value.items())
    if isinstance(value, list):
        separator = "x" if value and all(isinstance(item, int) for item in value) else ", "
        return separator.join(_brief(item) for item in value)
    return str(value)
