"""Flags of `tilewright serve` that are written out mean the same without the parser of all commands."""

from __future__ import annotations

import pytest
from typer.main import get_command

from tilewright_server.settings import TABLE
from tilewright_tools.cli.app import app
from tilewright_tools.cli.service.starting import LISTS, names_of, plain_flags

SERVE = get_command(app).commands["serve"]
VALUES = {"names": ["gemm", "a=b"], "addresses": ["unix:/tmp/a.sock", "127.0.0.1:0"]}


def parsed(arguments: list[str]) -> dict[str, object]:
    """Arguments as the whole parser reads them."""
    parameters = SERVE.make_context("tilewright serve", list(arguments)).params
    given = {name: value for name, value in parameters.items() if value not in (None, [], ())}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def spellings() -> list[list[str]]:
    """Every flag of the table in all its ways, and some together."""
    found: list[list[str]] = [[], ["--config", "a.toml"], ["--config=a.toml", "--grace-s", "3", "--grace-s", "4"]]
    for row in TABLE:
        for name in names_of(row):
            if row.kind == "flag":
                found += [[name], [f"--no-{name[2:]}"], [name, f"--no-{name[2:]}"]]
            elif row.kind in LISTS:
                values = VALUES[row.kind]
                found += [[name, values[0]], [part for value in values for part in (name, value)]]
            else:
                found += [[name, "some thing"], [f"{name}=5"], [f"{name}="]]
    return [*found, ["--listen=unix:/a", "--insecure", "--listen", "unix:/b", "--log-level", "debug"]]


def test_plain_flags_mean_what_the_parser_says() -> None:
    for arguments in spellings():
        assert plain_flags(arguments) == parsed(arguments), arguments


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["-h"], ["extra"], ["--"], ["--no-such-flag", "1"], ["--no-listen", "unix:/a"], ["--listen"]),
        *(["--insecure=yes"], ["--grace-s", "-1"], ["--device", "--insecure"], ["--list", "unix:/a"]),
    ],
    ids=" ".join,
)
def test_anything_else_is_left_to_the_parser(arguments: list[str]) -> None:
    assert plain_flags(arguments) is None


def test_errors_of_plain_flags_are_told_as_any(cli) -> None:
    ran = cli("serve", "--grace-s", "soon")
    assert ran.code == 2 and "grace_s" in ran.err and "fix:" in ran.err
