"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


class Signed:
    """A certificate and its key, as files."""

    def __init__(self, folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.x509 = certificate
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    @property
    def fingerprint(self) -> str:
        return self.x509.fingerprint(hashes.SHA256()).hex()


class Authority:
    """Signs certificates of servers and clients."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._build(self._name, self._key, -1, 30).add_extension(x509.BasicConstraints(True, None), True)
        self.x509 = made.sign(self._key, hashes.SHA256())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.x509.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *others: x509.GeneralName, since: int = -1, until: int = 30) -> Signed:
        """A certificate of ``name``, valid between two days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._build(subject, key, since, until).add_extension(usages, False)
        if others:
            made = made.add_extension(x509.SubjectAlternativeName(others), False)
        return Signed(self.folder, name, made.sign(self._key, hashes.SHA256()), key)

    def server(self, name: str = "server") -> Signed:
        return self.sign(name, x509.DNSName("localhost"))

    def revoke(self, path: Path, *revoked: Signed) -> None:
        """Write the list of revoked certificates."""
        listed = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        listed = listed.last_update(NOW - DAY).next_update(NOW + DAY)
        for item in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(item.x509.serial_number).revocation_date(NOW - DAY)
            listed = listed.add_revoked_certificate(entry.build())
        path.write_bytes(listed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _build(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, since: int, until: int
    ) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number())
        return made.not_valid_before(NOW + since * DAY).not_valid_after(NOW + until * DAY)
