"""A separate S3Proxy for a test, with HTTP, or TLS and a certificate of a private authority."""

import http.client
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    load_pem_private_key,
    pkcs12,
)
from servers import serving

from anabranch.dev.services import ACCESS_KEY, SECRET_KEY, s3_server
from anabranch.dev.services.processes import HOST, free_port, properties_text
from anabranch.spark.jars import ensure_jars, jvm_folder
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
        command = [
            str(keytool), "-importcert", "-noprompt", "-alias", "s3", "-file", str(self.file),
        ]  # fmt: skip
        command += ["-keystore", str(store), "-storepass", STORE_PASSWORD]
        subprocess.run(command, check=True, capture_output=True)
        return (
            f"-Djavax.net.ssl.trustStore={store} "
            f"-Djavax.net.ssl.trustStorePassword={STORE_PASSWORD}"
        )

    def server_context(self) -> ssl.SSLContext:
        """Return a server's TLS context, with a certificate of this machine."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.issuer.issue_cert(HOST).configure_cert(context)
        return context


def new_authority(folder: Path) -> Authority:
    issuer, file = trustme.CA(), folder / "ca.pem"
    issuer.cert_pem.write_to_path(str(file))
    return Authority(issuer, file)


@contextmanager
def running_s3_proxy(folder: Path, authority: Authority | None = None) -> Iterator[int]:
    """Run a new server with the local keys within a `with`; it ignores session tokens. Its port."""
    port, file = free_port(), folder / "s3.properties"
    (folder / "data").mkdir()
    properties = s3_server.server_properties(port, ACCESS_KEY, SECRET_KEY, folder / "data")
    properties["s3proxy.ignore-unknown-headers"] = "true"
    if authority is not None:
        del properties["s3proxy.endpoint"]
        properties |= {
            "s3proxy.secure-endpoint": f"https://{HOST}:{port}",
            "s3proxy.keystore-path": authority.keystore(folder / "s3.p12"),
            "s3proxy.keystore-password": STORE_PASSWORD,
        }
    file.write_text(properties_text(properties), "utf-8")

    def answers() -> bool:
        if authority is None:
            return s3_server.answers(port)
        trusting = ssl.create_default_context(cafile=authority.file)
        connection = http.client.HTTPSConnection(HOST, port, timeout=10, context=trusting)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 403
        finally:
            connection.close()

    logging = f"-Dlogback.configurationFile={jvm_folder() / 'logback-s3proxy.xml'}"
    java = [str(require_java()), "-Xmx256m", "-Djava.awt.headless=true", logging]
    classes = {"CLASSPATH": os.pathsep.join(map(str, ensure_jars().s3))}
    command = [*java, "org.gaul.s3proxy.Main", "--properties", str(file)]
    with serving(command, folder / "s3proxy.log", answers, environment=classes):
        yield port
