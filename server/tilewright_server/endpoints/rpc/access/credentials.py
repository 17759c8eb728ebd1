"""Certificates of the server, read anew when their files change, and those of clients that were revoked."""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc

from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_server.endpoints.rpc.access.contexts import TlsFiles, stamps
from tilewright_server.settings import Settings

__all__ = ["Certificates", "fingerprint", "make_certificates"]

log = logging.getLogger("tilewright.access")

MOST_BYTES = 1 << 20


class Certificates:
    """Credentials for listeners. New connections get what the files hold when they come; those that are open go on.
    Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ``InvalidArgumentError`` if a file is missing or bad, ``UnsupportedError`` without ``cryptography`` if
        a revocation list is named."""
        self.files = files
        self._lock = threading.Lock()
        self._stamp = stamps(self.files)
        self._configuration, self._serials = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """For one call of ``add_secure_port``."""
        given = self._configuration

        def fetch() -> Any:
            """The configuration if it is another than the last; runs with every handshake. gRPC takes one that is given
            for a new one, and ends the process if handshakes fail while it is put in the other's place."""
            nonlocal given
            latest = self.latest()
            with self._lock:
                if latest is given:
                    return None
                given = latest
            return latest

        needed = self.files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(given, fetch, require_client_authentication=needed)

    def refresh(self) -> None:
        """Read the files again if they have changed. Raises ``InvalidArgumentError``; the old ones then stay."""
        with self._lock:
            stamp = stamps(self.files)
            if stamp == self._stamp:
                return
            self._stamp = stamp  # a mistake is said once, not with every connection
            self._configuration, self._serials = self._read()
            log.info("certificates were read again")

    def is_revoked(self, pem: bytes) -> bool:
        """True for a client's certificate that the revocation list names."""
        return bool(self._serials) and _serial(pem) in self._serials

    def latest(self) -> Any:
        """Content of the files, or what they held last. Does not raise."""
        try:
            self.refresh()
        except InvalidArgumentError as error:
            log.error("the certificates stay as they are: %s", error)
        except Exception:
            log.exception("the certificates stay as they are")
        return self._configuration

    def _read(self) -> tuple[Any, frozenset[int]]:
        files = self.files
        chain, key = _content(files.certificate, "tls_cert"), _content(files.key, "tls_key")
        # OpenSSL says what gRPC would only find out with the first connection.
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"the certificate and its key cannot be used: {error}",
                field="tls_cert",
                value=str(files.certificate),
                rule="tls_files",
                fix="give a chain in PEM form, the server's own certificate first, and its key without a password",
            ) from error
        authorities = None
        if files.client_ca is not None:
            authorities = _content(files.client_ca, "tls_client_ca")
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise InvalidArgumentError(
                    f"the authorities of clients cannot be used: {error}",
                    field="tls_client_ca",
                    value=str(files.client_ca),
                    rule="tls_files",
                    fix="give their certificates in PEM form",
                ) from error
        serials = _revoked(files.revoked, authorities) if files.revoked is not None else frozenset()
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities), serials


def make_certificates(settings: Settings) -> Certificates | None:
    """The certificates that the settings name; None without TLS. Raises what ``Certificates`` does."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca, settings.tls_crl))


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate, in hexadecimal digits."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).hexdigest()


def _content(path: Path, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise InvalidArgumentError(
            f"the file cannot be read: {error.strerror}",
            field=field,
            value=str(path),
            rule="tls_files",
            fix="name a file that the server's user can read",
        ) from error


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError:
        raise UnsupportedError(
            "revocation lists need the package cryptography",
            field="tls_crl",
            rule="tls_crl",
            fix="pip install 'tilewright[tls]', or name fingerprints in the policy file (revoked)",
        ) from None
    return x509


@lru_cache(maxsize=4096)
def _serial(pem: bytes) -> int:
    return int(_x509().load_pem_x509_certificate(pem).serial_number)


def _revoked(path: Path, authorities: bytes | None) -> frozenset[int]:
    x509 = _x509()
    content = _content(path, "tls_crl")
    try:
        listed = x509.load_pem_x509_crl(content)
        issuers = x509.load_pem_x509_certificates(authorities or b"")
        signed = any(item.subject == listed.issuer and _signed_by(listed, item) for item in issuers)
    except ValueError as error:
        raise _bad_list(path, f"it cannot be read: {error}") from error
    if not signed:
        raise _bad_list(path, "none of the authorities of tls_client_ca has signed it")
    return frozenset(int(item.serial_number) for item in listed)


def _signed_by(listed: Any, issuer: Any) -> bool:
    return bool(listed.is_signature_valid(issuer.public_key()))


def _bad_list(path: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the revocation list cannot be used: {reason}",
        field="tls_crl",
        value=str(path),
        rule="tls_files",
        fix="give a list in PEM form that an authority of tls_client_ca has signed",
    )
