"""The gate: the principal of a call, from its certificate or token, and whether its roles allow the method."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, TilewrightError, UnauthenticatedError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.access.credentials import Certificates, fingerprint
from tilewright_server.endpoints.rpc.access.policy import Grant, Policy, read_policy
from tilewright_server.endpoints.rpc.access.roles import Role, role_of
from tilewright_server.session.processes import is_known

__all__ = ["Caller", "Gate"]

log = logging.getLogger("tilewright.access")

AUTHORIZATION = "authorization"
BEARER = "bearer "
_ALL = frozenset(Role)
_OPEN = Grant("tcp", _ALL)
"""A caller over TCP without TLS, which the operator has allowed."""
_CERTIFIED = frozenset({Role.DISPATCH, Role.BUILD, Role.TUNE})
"""Roles of certificates where there is no policy."""


class Caller(Protocol):
    """A call, as far as it says where it comes from."""

    method: str
    client: Client

    def peer(self) -> str: ...

    def certificate(self) -> Mapping[str, Sequence[bytes]] | None: ...

    def metadata(self) -> Sequence[tuple[str, str | bytes]]: ...


class Gate:
    """Asked with every call of the network. What comes over a Unix socket passes, unless the policy names users."""

    def __init__(
        self, policy: Path | None = None, certificates: Certificates | None = None, *, open_socket: bool = False
    ) -> None:
        """``open_socket``: others than the server's user reach its Unix sockets.

        Raises ``InvalidArgumentError`` or ``NotFoundError`` for a bad policy file."""
        self._path = policy
        self._certificates = certificates
        self._open_socket = open_socket
        self._policy: Policy | None = read_policy(policy) if policy is not None else None

    @property
    def knows_tokens(self) -> bool:
        """The policy has bearer tokens, which prove who calls without a certificate."""
        return self._policy is not None and bool(self._policy.tokens)

    def reload(self) -> None:
        """Read the policy and the certificates again. With a mistake in one, that one stays, and the log says so."""
        try:
            if self._path is not None:
                self._policy = read_policy(self._path)
        except TilewrightError as error:
            log.error("the policy stays as it is: %s", error)
        try:
            if self._certificates is not None:
                self._certificates.refresh()
        except InvalidArgumentError as error:
            log.error("the certificates stay as they are: %s", error)

    def admit(self, call: Caller) -> Client:
        """The client of a call that came over TCP.

        Raises ``UnauthenticatedError`` if it proves nothing that is known, ``AccessError`` if its roles do not allow
        the method. ``call.client`` is set in any case, as far as it is known.
        """
        peer = call.peer()
        role = role_of(call.method)
        certificate = call.certificate()
        if certificate is None:
            grant = _OPEN
            principal = "tcp:" + peer.rpartition(":")[0]
        else:
            call.client = Client("tls:" + peer.rpartition(":")[0], f"connection:{peer}", b"")
            if role is None:
                return call.client
            grant = self._grant(certificate, call.metadata())
            principal = f"principal:{grant.name}"
        call.client = Client(principal, f"connection:{peer}", b"")
        self._require(grant, role, call.method)
        return call.client

    def check_user(self, client: Client, method: str, *, proved: bool = True) -> None:
        """Raise ``AccessError`` if the policy names users of Unix sockets, and this one may not call ``method``.

        Without a proof of its user a client is the server's own, unless others reach the socket too.
        """
        policy, role = self._policy, role_of(method)
        if policy is None or not policy.uids or role is None:
            return
        text = client.principal.removeprefix("uid:").partition("@")[0]  # in whichever namespace
        uid = int(text) if text.isdigit() and (proved or not self._open_socket) else -1
        if uid in (0, os.geteuid()) and uid not in policy.uids:
            return
        grant = policy.uids.get(uid)
        if grant is None:
            raise AccessError(
                "the policy names no principal of this user",
                field="uid",
                value=text if proved else "",
                rule="policy_principal",
                fix="open a session, which proves the user, and have the operator add its uid to the policy",
            )
        self._require(grant, role, method)

    def check_owner(self, client: Client) -> None:
        """Raise ``AccessError`` for a caller over a Unix socket that others than the server's user reach too, unless
        it has proved to be that user or root, or the policy says who may do what.
        """
        named = self._policy is not None and self._policy.uids
        if not self._open_socket or named:
            return
        if not is_known(client) or client.principal not in ("uid:0", f"uid:{os.geteuid()}"):
            raise AccessError(
                "this socket is open to other users, and the call does not prove that it comes from the server's own",
                field="session",
                value=client.principal if is_known(client) else "",
                rule="server_user",
                fix="name a session that a process of the server's user opened, or have the policy grant `administer`",
            )

    def _grant(self, certificate: Mapping[str, Sequence[bytes]], metadata: Sequence[tuple[str, str | bytes]]) -> Grant:
        policy = self._policy
        pem = next(iter(certificate.get("x509_pem_cert", ())), None)
        if pem is not None:
            self._refuse_revoked(pem)
        given = next((str(value) for key, value in metadata if key == AUTHORIZATION), "")
        if given and policy is not None:
            if given[: len(BEARER)].lower() == BEARER:
                digest = hashlib.sha256(given[len(BEARER) :].strip().encode()).hexdigest()
                found = policy.tokens.get(digest)
                if found is not None:
                    return found
            raise UnauthenticatedError(
                "the token is not known here", field=AUTHORIZATION, rule="token", fix="ask the operator for a token"
            )
        names = _names(certificate) if pem is not None else []
        if policy is None:
            return Grant(names[0], _CERTIFIED) if names else _nobody()
        return policy.of_certificate(names) or _nobody(names)

    def _refuse_revoked(self, pem: bytes) -> None:
        named = self._policy is not None and fingerprint(pem) in self._policy.revoked
        if named or (self._certificates is not None and self._certificates.is_revoked(pem)):
            raise UnauthenticatedError(
                "the certificate was revoked", field="certificate", rule="revoked", fix="ask the operator for a new one"
            )

    @staticmethod
    def _require(grant: Grant, role: Role | None, method: str) -> None:
        if role is not None and not grant.allows(role):
            raise AccessError(
                f"{method.rpartition('.')[2]} takes the role {role.value}",
                field="principal",
                value=grant.name,
                rule="role",
                fix=f"have the operator add {role.value} to its roles in the policy file",
            )


def _names(certificate: Mapping[str, Sequence[bytes]]) -> list[str]:
    """SPIFFE ids, other names and the common name of a certificate, in this order."""
    kinds = ("peer_spiffe_id", "x509_subject_alternative_name", "x509_common_name")
    return [value.decode("utf-8", "replace") for kind in kinds for value in certificate.get(kind, ()) if value]


def _nobody(names: Sequence[str] = ()) -> NoReturn:
    raise UnauthenticatedError(
        "the policy names no principal of this certificate" if names else "the call proves nothing about its caller",
        field="certificate" if names else AUTHORIZATION,
        value=names[0] if names else "",
        rule="principal",
        fix="use a certificate that the policy names, or send the metadata 'authorization: Bearer TOKEN'",
    )
