"""TLS of connections to servers elsewhere: authorities, the client's certificate, a bearer token."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tilewright.errors import InvalidArgumentError
from tilewright.session import settings

__all__ = ["Tls", "channel_credentials", "channel_options", "tls_for"]

Readable = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form, read with each new connection. ``connect(..., tls=Tls(...))``."""

    ca: Readable | None = None
    """Authorities that the server's certificate must come from; None: those that gRPC ships."""
    certificate: Readable | None = None
    """The client's own certificate chain, where the server asks for one."""
    key: Readable | None = None
    """Key of ``certificate``, without a password."""
    token_file: Readable | None = None
    """File of a bearer token, read with each call: whoever rotates it need not tell us."""
    server_name: str | None = None
    """Name that the server's certificate must hold, if it is another than the target's."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError(
                "a certificate goes with its key",
                field="tls.key" if self.key is None else "tls.certificate",
                rule="tls_files",
                fix="give both certificate and key, or neither",
            )


def tls_for(target: str, tls: Tls | None = None) -> Tls | None:
    """TLS as the argument says it, else for a server elsewhere as the environment does.

    Raises ``InvalidArgumentError``.
    """
    if tls is not None and not isinstance(tls, Tls):
        raise InvalidArgumentError(
            "tls is a tilewright.Tls", field="tls", value=tls, rule="argument_type", fix="give Tls(ca=...), or nothing"
        )
    local = target.startswith("unix")
    if tls is None:
        files = {} if local else settings.tls_files()
        return Tls(**files) if files else None
    if local:
        raise InvalidArgumentError(
            "Unix sockets have no TLS", field="tls", value=target, rule="tls_target", fix="leave tls out"
        )
    return tls


def channel_options(tls: Tls) -> tuple[tuple[str, Any], ...]:
    """Options of a channel that TLS asks for."""
    return (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials of one connection. Raises ``InvalidArgumentError`` if a file cannot be read."""
    credentials = grpc.ssl_channel_credentials(
        _content(tls.ca, "tls.ca"), _content(tls.key, "tls.key"), _content(tls.certificate, "tls.certificate")
    )
    if tls.token_file is None:
        return credentials
    _content(tls.token_file, "tls.token_file")
    return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_Bearer(tls.token_file)))


class _Bearer(grpc.AuthMetadataPlugin):  # type: ignore[misc]
    """Names the token of a file with each call."""

    def __init__(self, path: Readable) -> None:
        self._path = path

    def __call__(self, _: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        try:
            token = Path(self._path).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {token}"),), None)


def _content(path: Readable | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"the file cannot be read: {error.strerror}",
            field=field,
            value=str(path),
            rule="tls_files",
            fix="name a file that this user can read",
        ) from error
