"""A certificate authority of elliptic-curve keys, kept as `NAME.crt` and `NAME.key` in one folder."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class Authority:
    """Signs certificates for servers and clients."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path, name: str) -> "Authority":
        """Make an authority and write it to the folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"test cluster {name}")
        certificate = (
            _builder(subject, issuer=subject, key=key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_key_usage(), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(folder, name, certificate, key)
        return cls(folder, certificate, key)

    def issue(
        self,
        name: str,
        *,
        common_name: str,
        organization: str | None = None,
        dns: Sequence[str] = (),
        ips: Sequence[str] = (),
    ) -> None:
        """Write a key and a certificate for it, good for a server with these names and for a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(_subject(common_name, organization), issuer=self.certificate.subject, key=key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        if dns or ips:
            names = [x509.DNSName(each) for each in dns] + [x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        _write(self.folder, name, builder.sign(self.key, hashes.SHA256()), key)

    def issue_key_pair(self, name: str) -> None:
        """Write a key pair, `NAME.key` and `NAME.pub`, as service account tokens are signed with."""
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(self.folder / f"{name}.key", key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / f"{name}.pub").write_bytes(public)


def _subject(common_name: str, organization: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _builder(subject: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(minutes=5),
        not_valid_after=now + VALID,
    )


def _key_usage() -> x509.KeyUsage:
    names = "content_commitment key_encipherment data_encipherment key_agreement crl_sign encipher_only decipher_only"
    return x509.KeyUsage(digital_signature=True, key_cert_sign=True, **dict.fromkeys(names.split(), False))


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / f"{name}.key", key)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
