"""Objects as servers of a fleet write them: a line of JSON with digest and signature, then the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright_kit.types.errors import AccessError, InvalidArgumentError
from tilewright_server.protocol.signatures import check_record, read_private, read_trusted, signed_record

__all__ = ["Seal", "refused_object"]

FORMAT = 1
MOST_HEADER = 4096


class Seal:
    """Seals what this server writes, and opens what others wrote."""

    def __init__(self, key: Path | None = None, trusted: Path | None = None) -> None:
        """``key``: a private key to sign with. ``trusted``: public keys, one of which must have signed what is opened.

        Raises what ``read_private`` and ``read_trusted`` raise.
        """
        self._private: Any = read_private(key) if key is not None else None
        self._trusted: Sequence[Any] = read_trusted(trusted) if trusted is not None else ()

    @property
    def is_trusted(self) -> bool:
        """True if this server takes what it has sealed itself."""
        try:
            self.open(self.close(b""))
        except AccessError:
            return False
        return True

    def close(self, content: bytes) -> bytes:
        """The content as an object."""
        digest = hashlib.sha256(content).hexdigest()
        signature = signed_record(self._private, digest) if self._private is not None else None
        header = {"fleet": FORMAT, "bytes": len(content), "sha256": digest, "signature": signature}
        return json.dumps(header, separators=(",", ":")).encode() + b"\n" + content

    def open(self, data: bytes) -> bytes:
        """The content of an object.

        Raises ``InvalidArgumentError`` (rule ``fleet_object``) for one that is cut off, changed or of another form,
        ``AccessError`` for one that no trusted key has signed.
        """
        end = data.find(b"\n", 0, MOST_HEADER)
        try:
            header = json.loads(data[: max(end, 0)])
            version, nbytes, digest, signature = (header[name] for name in ("fleet", "bytes", "sha256", "signature"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise refused_object("it does not begin as such an object does") from error
        if version != FORMAT:
            raise refused_object(f"its form is not that of version {FORMAT}")
        content = data[end + 1 :]
        if len(content) != nbytes:
            raise refused_object(f"it has {len(content)} bytes instead of {nbytes}")
        if hashlib.sha256(content).hexdigest() != digest:
            raise refused_object("its content is not what its digest says")
        if self._trusted:
            if signature is None:
                raise AccessError(
                    "an object of the fleet's storage was refused: it has no signature, and one is required here",
                    field="signature",
                    rule="signature_missing",
                    fix="have the servers that write there sign (fleet_key)",
                )
            check_record(signature, digest, self._trusted)
        return content


def refused_object(why: str) -> InvalidArgumentError:
    """The error for an object that is not what it should be."""
    return InvalidArgumentError(
        f"an object of the fleet's storage was refused: {why}",
        field="fleet",
        rule="fleet_object",
        fix="find out who wrote it; a server that builds the same writes it anew",
    )
