"""`tilewright describe`: operands and attributes of an operation, as its plugin declares them."""

from __future__ import annotations

import sys

import typer

from tilewright_tools.cli.console.output import examples, out, print_json, table

__all__ = ["EPILOG", "describe"]

EPILOG = examples(
    "tilewright describe                            which operations there are",
    "tilewright describe gemm                       operands and attributes of products",
    "tilewright describe attention --json           the same, for scripts",
    "tilewright describe --page                     the reference of all operations (docs/operations.md)",
)


def describe(
    operation: str = typer.Argument("", help="An operation; without one, all are listed."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    page: bool = typer.Option(False, "--page", help="Print the reference of all operations as Markdown."),
) -> None:
    """Describe an operation: operands, attributes, what they may be, and examples. No server is asked."""
    from tilewright_kit.contract.abilities import Declared
    from tilewright_kit.loading.loader import PluginManager
    from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
    from tilewright_tools.cli.machine.operation_pages import operation_record, operation_text, reference_page

    manager = PluginManager()
    manager.load_entry_points()
    known = manager.operations
    if page:
        if operation or as_json:
            raise InvalidArgumentError(
                "the page is of all operations, in Markdown", field="--page", rule="option", fix="leave the rest out"
            )
        sys.stdout.write(reference_page(known.values()))
        return
    if operation and operation not in known:
        raise NotFoundError(
            "there is no such operation",
            field="operation",
            value=operation,
            rule="operation",
            fix=f"use one of: {', '.join(known)}",
        )
    chosen = [known[operation]] if operation else list(known.values())
    if as_json:
        records = [operation_record(item) for item in chosen]
        print_json(records[0] if operation else records)
    elif operation:
        _show(operation_text(chosen[0]))
    else:
        rows = [(item.name, item.declaration.summary if isinstance(item, Declared) else "") for item in chosen]
        table("", ("operation", "computes"), rows)


def _show(page: str) -> None:
    """A page in Markdown: as it is into a pipe, laid out for its width on a terminal."""
    console = out()
    if not console.is_terminal:
        sys.stdout.write(page)
        return
    from rich.markdown import Markdown

    console.print(Markdown(page))
