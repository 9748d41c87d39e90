"""A private certificate authority, and what servers and clients of a test need of it."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    load_pem_private_key,
    pkcs12,
)
from programs import output_of

from anabranch.dev.services.processes import HOST
from anabranch.spark.java import require_java

STORE_PASSWORD = "changeit"


@dataclass(frozen=True)
class Authority:
    """A private certificate authority. `file`: its certificate."""

    issuer: trustme.CA
    file: Path

    def keystore(self, file: Path) -> Path:
        """Write a keystore with a certificate of this machine."""
        issued = self.issuer.issue_cert(HOST)
        key = load_pem_private_key(issued.private_key_pem.bytes(), None)
        own, *chain = [x509.load_pem_x509_certificate(x.bytes()) for x in issued.cert_chain_pems]
        secret = BestAvailableEncryption(STORE_PASSWORD.encode())
        file.write_bytes(pkcs12.serialize_key_and_certificates(b"s3", key, own, chain, secret))  # type: ignore[arg-type]
        return file

    def trust(self, store: Path) -> str:
        """Create the trust store of docs/how-to/deploy/services.md; return its Java options."""
        keytool = require_java().resolve().with_name("keytool")
        command = (keytool, "-importcert", "-noprompt", "-alias", "s3", "-file", self.file)
        output_of(*command, "-keystore", store, "-storepass", STORE_PASSWORD)
        trust = "-Djavax.net.ssl.trustStore"
        return f"{trust}={store} {trust}Password={STORE_PASSWORD}"

    def server_context(self) -> ssl.SSLContext:
        """Return a server's TLS context, with a certificate of this machine."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.issuer.issue_cert(HOST).configure_cert(context)
        return context


def new_authority(folder: Path) -> Authority:
    issuer, file = trustme.CA(), folder / "ca.pem"
    issuer.cert_pem.write_to_path(str(file))
    return Authority(issuer, file)
