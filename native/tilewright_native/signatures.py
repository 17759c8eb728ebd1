"""Signatures of what is code: bundles and archives of the cache, in a file of its own beside each, and what servers of
a fleet share, inside of it. Ed25519.

The signed message names the SHA-256 of the file, so that files of any size are read once. Keys are PEM files, as
`openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "SUFFIX",
    "SignatureProblem",
    "check_file",
    "check_record",
    "check_signature",
    "read_private",
    "read_trusted",
    "sign",
    "signature_path",
    "signed_record",
]

SUFFIX = ".sig"
FORMAT = 1
MOST_BYTES = 64 * 1024
"""Bytes of a signature's file or of a file of keys."""
_BLOCK = 1 << 20
_END = b"-----END PUBLIC KEY-----"


class SignatureProblem(Exception):
    """A refusal, for the package that asked to raise as an error of its own: all but the code are words of that."""

    def __init__(
        self, code: str, reason: str, *, field: str = "", value: object = "", rule: str = "", fix: str = ""
    ) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason
        self.words: dict[str, Any] = {"field": field, "value": value, "rule": rule, "fix": fix}


def signature_path(path: Path) -> Path:
    """The file of the signature of ``path``."""
    return path.with_name(path.name + SUFFIX)


def sign(path: Path, key: Path) -> Path:
    """Sign the file with the private key in ``key`` and return the signature's path.

    Raises ``SignatureProblem`` of code ``invalid_argument``, ``not_found``, or ``unsupported`` without
    ``cryptography``.
    """
    private = read_private(key)
    with _opened(path, "file") as file:
        record = signed_record(private, _digest(file))
    made = signature_path(path)
    try:
        made.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise SignatureProblem(
            "invalid_argument",
            f"the signature cannot be written: {error.strerror}",
            field="sign",
            value=str(made),
            rule="signature_file",
            fix="write to a folder that this user may write to",
        ) from error
    return made


def signed_record(private: Any, digest: str) -> dict[str, Any]:
    """The signature of a private key of ``read_private`` under the content with that SHA-256, for JSON."""
    return {
        "signature": FORMAT,
        "algorithm": "ed25519",
        "sha256": digest,
        "key": _fingerprint(private.public_key()),
        "value": base64.b64encode(private.sign(_message(digest))).decode(),
    }


def read_trusted(path: Path) -> tuple[Any, ...]:
    """The public keys of a PEM file, one or several. Errors as of ``sign``."""
    ed25519, serialization = _cryptography()
    data = _content(path, "key")
    parts = [part.strip() + b"\n" + _END + b"\n" for part in data.split(_END)[:-1]]
    try:
        keys = tuple(serialization.load_pem_public_key(part) for part in parts)
    except ValueError as error:
        raise _bad_key(path, "public", str(error)) from error
    if not keys or not all(isinstance(item, ed25519.Ed25519PublicKey) for item in keys):
        raise _bad_key(path, "public", "it holds none, or one of another kind")
    return keys


def check_signature(path: Path, file: BinaryIO, keys: Sequence[Any]) -> str:
    """Check that one of ``keys`` has signed the content of ``file``, which is ``path`` and stays at its beginning, and
    return the key's fingerprint.

    Raises ``SignatureProblem`` of code ``permission_denied`` for a signature that is missing (rule
    ``signature_missing``), of no such key
    (``signature_key``), of other content (``signature_content``), or damaged (``signature_damaged``).
    """
    file.seek(0)
    digest = _digest(file)
    file.seek(0)
    return check_record(_record(path), digest, keys)


def check_file(path: Path, keys: Sequence[Any]) -> str:
    """``check_signature`` of a file by its path. Raises ``SignatureProblem`` of code ``not_found`` too."""
    with _opened(path, "path") as file:
        return check_signature(path, file, keys)


def check_record(record: Any, digest: str, keys: Sequence[Any]) -> str:
    """Check that one of ``keys`` has made a record of ``signed_record``, for the content with that SHA-256, and return
    the key's fingerprint. Raises ``SignatureProblem`` of code ``permission_denied``, with the rules of
    ``check_signature``."""
    from cryptography.exceptions import InvalidSignature

    try:
        sha256, named, value = (record[name] for name in ("sha256", "key", "value"))
        version, algorithm = record["signature"], record["algorithm"]
    except (KeyError, TypeError) as error:
        raise _damaged("it is no record of one") from error
    if (version, algorithm) != (FORMAT, "ed25519") or not all(isinstance(item, str) for item in (sha256, named, value)):
        raise _damaged(f"its form is not that of version {FORMAT} with ed25519")
    key = next((item for item in keys if _fingerprint(item) == named), None)
    if key is None:
        raise _refused(
            "it is signed by a key that is not trusted here",
            named,
            "signature_key",
            "have it signed with a trusted key, or trust this one if you know whose it is",
        )
    try:
        key.verify(base64.b64decode(value, validate=True), _message(sha256))
    except (InvalidSignature, ValueError) as error:
        raise _damaged("the key did not make it") from error
    if digest != sha256:
        raise _refused(
            "its content is not what was signed",
            digest,
            "signature_content",
            "fetch it again together with its signature, from where it was signed",
        )
    return str(named)


def _record(path: Path) -> Any:
    where = signature_path(path)
    if not where.exists():
        raise _refused(
            "it has no signature, and one is required here",
            str(where),
            "signature_missing",
            f"put its signature beside it ({where.name}), or have it signed (--sign)",
        )
    try:
        return json.loads(_content(where, "signature"))
    except (ValueError, RecursionError) as error:
        raise _damaged("it is no record of one") from error


def _message(digest: str) -> bytes:
    """The bytes that are signed. They say what they are, so that no other signature of the key can stand for them."""
    return f"tilewright file {FORMAT}\nsha256 {digest}\n".encode()


def _digest(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while block := file.read(_BLOCK):
        found.update(block)
    return found.hexdigest()


def _fingerprint(key: Any) -> str:
    _, serialization = _cryptography()
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:32]


def read_private(path: Path) -> Any:
    """The private key of a PEM file. Errors as of ``sign``."""
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_pem_private_key(_content(path, "sign"), password=None)
    except (ValueError, TypeError) as error:
        raise _bad_key(path, "private", str(error)) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _bad_key(path, "private", "it is of another kind")
    return key


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SignatureProblem(
            "unsupported",
            "signatures need the package cryptography",
            field="key",
            rule="signature_package",
            fix="pip install 'tilewright[tls]'",
        ) from None
    return ed25519, serialization


def _opened(path: Path, field: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SignatureProblem(
            "not_found",
            f"a file cannot be read: {error.strerror}",
            field=field,
            value=str(path),
            rule="signature_file",
            fix="give the path of a file that this user may read",
        ) from error


def _content(path: Path, field: str) -> bytes:
    with _opened(path, field) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            return file.read(MOST_BYTES) if size <= MOST_BYTES else b""
        except OSError as error:  # a folder
            raise _bad_key(path, "public", str(error.strerror)) from error


def _bad_key(path: Path, kind: str, why: str) -> SignatureProblem:
    make = "openssl genpkey -algorithm ed25519 -out key.pem"
    make += "; openssl pkey -in key.pem -pubout -out key.pub" if kind == "public" else ""
    return SignatureProblem(
        "invalid_argument",
        f"the file is no {kind} Ed25519 key in PEM form, without a password: {why}",
        field="sign" if kind == "private" else "key",
        value=str(path),
        rule="signature_key_file",
        fix=f"make one: {make}",
    )


def _damaged(why: str) -> SignatureProblem:
    return _refused(
        f"its signature is damaged: {why}",
        "",
        "signature_damaged",
        "fetch the signature again, or have the file signed again",
    )


def _refused(why: str, value: str, rule: str, fix: str) -> SignatureProblem:
    return SignatureProblem(
        "permission_denied", f"the file was refused: {why}", field="signature", value=value, rule=rule, fix=fix
    )
