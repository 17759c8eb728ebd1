"""Options of commands that sign files, or check who signed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tilewright_tools.cli.console.output import note

__all__ = ["KEY", "SIGN", "SIGN_HELP", "check_signer", "sign_file", "trusted_keys"]

SIGN_HELP = "Private Ed25519 key (PEM) to sign the file with: FILE.sig is written too."
SIGN = typer.Option(None, "--sign", help=SIGN_HELP)
KEY = typer.Option(
    None,
    "--key",
    help="Public keys (PEM), of which one must have signed the file. Default: the setting `trusted_keys`.",
)


def sign_file(path: Path, key: Path | None) -> None:
    """Sign the file, if there is a key. Raises what ``sign`` raises."""
    from tilewright_server.protocol.signatures import sign

    if key is not None:
        note(f"signed: {sign(path, key)}")


def trusted_keys(key: Path | None) -> tuple[Any, ...]:
    """The public keys in ``key``, or those that the settings name; none if neither is given."""
    from tilewright_server import settings
    from tilewright_server.protocol.signatures import read_trusted

    found = key or settings.load().trusted_keys
    return read_trusted(found) if found is not None else ()


def check_signer(path: Path, key: Path | None = None) -> None:
    """Raise ``AccessError`` unless a trusted key has signed the file; say which. Without trusted keys do nothing."""
    from tilewright_server.protocol.signatures import check_signature

    keys = trusted_keys(key)
    if keys and path.exists():
        with path.open("rb") as content:
            note(f"signed by {check_signature(path, content, keys)}")
