"""Mutual TLS for a Ray of one machine, through Ray's own settings.

Ray Serve opens a gRPC port in every replica that takes pickled requests, and binds it to all interfaces, whatever
address Ray itself uses. With these settings it talks to nobody who does not hold the cluster's own certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME = datetime.timedelta(days=3650)
"""Longer than any cluster of one process lives; certificate and key go with its directory."""


def tls_settings(directory: Path) -> dict[str, str]:
    """Make a certificate and key in `directory`; return the environment variables with which Ray uses them.

    The certificate is its own authority, and both ends of a connection must show it. Files are readable by the user
    alone.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ropewalk")])
    hosts = [
        x509.DNSName("localhost"),
        x509.DNSName("127.0.0.1"),  # Ray's Python clients compare addresses as names
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    unencrypted = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate_file = _write(directory / "ray.crt", certificate.public_bytes(pem))
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": certificate_file,
        "RAY_TLS_SERVER_KEY": _write(directory / "ray.key", key.private_bytes(pem, pkcs8, unencrypted)),
        "RAY_TLS_CA_CERT": certificate_file,
    }


def _write(path: Path, content: bytes) -> str:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return str(path)
