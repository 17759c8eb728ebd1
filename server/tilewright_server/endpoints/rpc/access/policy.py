"""The policy file: principals, how they prove who they are, and their roles.

[[principal]]
name = "engine"
roles = ["dispatch", "build"]
spiffe = ["spiffe://example.org/ns/prod/sa/engine", "spiffe://example.org/ns/test/*"]
certificate = ["engine.example.org"]  # a name of the client's certificate
token_sha256 = ["9f86d0..."]  # of a bearer token
uid = [1000]  # over a Unix socket

revoked = ["3a7bd3..."]  # SHA-256 fingerprints of certificates; stands above the first [[principal]]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.endpoints.rpc.access.roles import Role
from tilewright_server.settings.values import read_file

__all__ = ["Grant", "Policy", "read_policy"]

SHA256 = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,63}")
SPIFFE = re.compile(r"spiffe://[^\s/*]+(/[^\s*]+)*(/\*)?")
LISTS = ("spiffe", "certificate", "token_sha256", "uid")
KNOWN = frozenset({"name", "roles", *LISTS})


@dataclass(frozen=True, slots=True)
class Grant:
    """A principal and its roles."""

    name: str
    roles: frozenset[Role]

    def allows(self, role: Role | None) -> bool:
        return role is None or role in self.roles or Role.ADMINISTER in self.roles


@dataclass(frozen=True, slots=True)
class Policy:
    """All principals of a policy file, by their proofs."""

    spiffe: Mapping[str, Grant] = field(default_factory=dict)
    prefixes: Mapping[str, Grant] = field(default_factory=dict)
    """SPIFFE ids that end with ``/*``, without the star."""
    certificates: Mapping[str, Grant] = field(default_factory=dict)
    tokens: Mapping[str, Grant] = field(default_factory=dict)
    uids: Mapping[int, Grant] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()

    def of_certificate(self, names: Iterable[str]) -> Grant | None:
        """The principal of a certificate with these names: SPIFFE ids, DNS names, the common name."""
        for name in names:
            found = self.spiffe.get(name) or self.certificates.get(name)
            if found is None and name.startswith("spiffe://"):
                longest = max((item for item in self.prefixes if name.startswith(item)), key=len, default=None)
                found = self.prefixes[longest] if longest is not None else None
            if found is not None:
                return found
        return None


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file.

    Raises ``InvalidArgumentError`` that names the entry and its mistake, ``NotFoundError`` if there is no file.
    """
    content = read_file(path)
    unknown = set(content) - {"principal", "revoked"}
    if unknown:
        raise _mistake(sorted(unknown)[0], "", "there is no such entry", "use [[principal]] and revoked")
    entries = content.get("principal", [])
    if not isinstance(entries, list) or not all(isinstance(item, dict) for item in entries):
        raise _mistake("principal", entries, "expected tables", "write [[principal]] above each")
    revoked = _values({"revoked": content.get("revoked", [])}, "revoked", "revoked")
    proofs: dict[str, dict[Any, Grant]] = {name: {} for name in LISTS}
    names: set[str] = set()
    for number, entry in enumerate(entries):
        where = f"principal[{number}]"
        grant = _grant(entry, where)
        if grant.name in names:
            raise _mistake(f"{where}.name", grant.name, "the name stands twice", "give each a name of its own")
        names.add(grant.name)
        for kind in LISTS:
            for value in _values(entry, kind, f"{where}.{kind}"):
                if value in proofs[kind]:
                    other = proofs[kind][value].name
                    raise _mistake(f"{where}.{kind}", value, f"it stands for {other} already", "name it once")
                proofs[kind][value] = grant
    spiffe = proofs["spiffe"]
    return Policy(
        spiffe={name: grant for name, grant in spiffe.items() if not name.endswith("/*")},
        prefixes={name[:-1]: grant for name, grant in spiffe.items() if name.endswith("/*")},
        certificates=proofs["certificate"],
        tokens=proofs["token_sha256"],
        uids=proofs["uid"],
        revoked=frozenset(revoked),
    )


def _grant(entry: Mapping[str, Any], where: str) -> Grant:
    unknown = set(entry) - KNOWN
    if unknown:
        raise _mistake(f"{where}.{sorted(unknown)[0]}", "", "there is no such field", f"use {', '.join(sorted(KNOWN))}")
    name, roles = entry.get("name"), entry.get("roles")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _mistake(f"{where}.name", name, "a name has 1 to 64 letters, digits and . _ @ / -", "give one")
    known = {role.value: role for role in Role}
    if not isinstance(roles, list) or not roles or not all(isinstance(role, str) for role in roles):
        raise _mistake(f"{where}.roles", roles, "expected a list of roles", f"use some of {', '.join(known)}")
    for role in roles:
        if role not in known:
            raise _mistake(f"{where}.roles", role, "there is no such role", f"use some of {', '.join(known)}")
    if not any(entry.get(kind) for kind in LISTS):
        raise _mistake(where, name, "nothing says who it is", f"give one of {', '.join(LISTS)}")
    return Grant(name, frozenset(known[role] for role in roles))


def _values(entry: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    values = entry.get(kind, [])
    if not isinstance(values, list):
        raise _mistake(where, values, "expected a list", f"write {kind} = [...]")
    for value in values:
        if kind == "uid":
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            wanted = "the number of a user"
        elif kind in ("token_sha256", "revoked"):
            good, wanted = isinstance(value, str) and bool(SHA256.fullmatch(value)), "64 small hexadecimal digits"
        elif kind == "spiffe":
            good = isinstance(value, str) and bool(SPIFFE.fullmatch(value))
            wanted = "spiffe://DOMAIN/PATH, with /* at its end for all below"
        else:
            good, wanted = isinstance(value, str) and bool(value.strip()), "a name of the certificate"
        if not good:
            raise _mistake(where, value, f"expected {wanted}", f"write {wanted}")
    return values


def _mistake(where: str, value: object, reason: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the policy file has a mistake: {reason}", field=f"policy.{where}", value=value, rule="policy_file", fix=fix
    )
