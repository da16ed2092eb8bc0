"""Certificates of a CA of our own, for tests."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


@dataclass(frozen=True)
class CertificateFiles:
    """A certificate and its key."""

    certificate: str
    key: str


class Authority:
    """A CA, whose certificate lies in ``path``.

    Args:
        folder: Folder for its files.
        name: Name of it.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._key, self._subject = folder, ec.generate_private_key(ec.SECP256R1()), _name(name)
        self.path = folder / f"{name}.pem"
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            self._builder(self._subject, self._key.public_key(), 1)
            .add_extension(x509.BasicConstraints(True, None), True)
            .add_extension(usage, True)
            .sign(self._key, hashes.SHA256())
        )
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, host: str = "localhost", days: int = 1) -> CertificateFiles:
        """A certificate for a host, valid for some days from yesterday on; expired if that is not above 0."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(host)]
        names += [x509.IPAddress(ip_address("127.0.0.1"))] if host == "localhost" else []
        certificate = (
            self._builder(_name(host), key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName(names), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
            .sign(self._key, hashes.SHA256())
        )
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(files[1], key)
        return CertificateFiles(str(files[0]), str(files[1]))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        )
