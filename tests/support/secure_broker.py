"""A Kafka broker that requires TLS, a password (SCRAM-SHA-512 or PLAIN) or a client certificate,
and ACLs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization
from kafka import KafkaAdminClient
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType

from anabranch.dev.services import kafka_broker
from anabranch.dev.services.processes import HOST, Daemon, free_port, stop_all
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java

USER, PASSWORD = "alice", 'pass"word\\with;all'
CLIENT = "reader"


@dataclass(frozen=True)
class SecureBroker:
    """A running broker: the addresses of its three listeners, and the files that a client needs."""

    plain: str
    sasl: str
    tls: str
    ca: Path
    other_ca: Path
    client: Path

    def security(self, how: str, **changes: str) -> dict[str, Any]:
        """Return the `kafka` section of a configuration for `scram`, `plain` or `mutual` (TLS)."""
        common = {"ssl.truststore.location": str(self.ca)}
        if how == "mutual":
            properties = {"security.protocol": "SSL", "ssl.keystore.location": str(self.client)}
            return {"bootstrap_servers": self.tls, "security": common | properties | changes}
        mechanism = {"scram": "SCRAM-SHA-512", "plain": "PLAIN"}[how]
        properties = {
            "security.protocol": "SASL_SSL", "sasl.mechanism": mechanism, "sasl.username": USER,
            "sasl.password": PASSWORD,
        }  # fmt: skip
        return {"bootstrap_servers": self.sasl, "security": common | properties | changes}

    def allow(self, topic: str, group: str) -> None:
        """Grant the operations of docs/how-to/deploy/services.md: READ, DESCRIBE and
        DESCRIBE_CONFIGS of the topic, and READ of the group."""
        self.grant(
            ResourceType.TOPIC,
            topic,
            ACLOperation.READ,
            ACLOperation.DESCRIBE,
            ACLOperation.DESCRIBE_CONFIGS,
        )
        self.grant(ResourceType.GROUP, group, ACLOperation.READ)

    def grant(self, kind: ResourceType, name: str, *operations: ACLOperation) -> None:
        """Grant both users these operations."""
        admin = KafkaAdminClient(bootstrap_servers=self.plain)
        try:
            admin.create_acls(
                [
                    ACL(
                        principal,
                        "*",
                        operation,
                        ACLPermissionType.ALLOW,
                        ResourcePattern(kind, name),
                    )
                    for principal in (f"User:{USER}", f"User:{CLIENT}")
                    for operation in operations
                ]
            )
        finally:
            admin.close()


def _write(certificate: trustme.LeafCert, file: Path) -> None:
    """Write key and chain into one file; Java reads only keys in PKCS 8."""
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(encoded + b"".join(pem.bytes() for pem in certificate.cert_chain_pems))


@contextmanager
def running_secure_broker(
    folder: Path, properties: Mapping[str, str] | None = None
) -> Iterator[SecureBroker]:
    """Run a new broker within a `with`; `properties` are added to its own."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, other = trustme.CA(), trustme.CA()
    server = authority.issue_cert(HOST)
    client = authority.issue_cert(f"{CLIENT}@example.org", common_name=CLIENT)
    files = {name: folder / f"{name}.pem" for name in ("ca", "other", "server", "client")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    other.cert_pem.write_to_path(str(files["other"]))
    _write(server, files["server"])
    _write(client, files["client"])
    port = free_port()
    sasl = free_port(port)
    tls = free_port(port, sasl)
    quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    jaas = "org.apache.kafka.common.security"
    more = {
        "listeners": f"SASL://{HOST}:{sasl},TLS://{HOST}:{tls}",
        "advertised.listeners": f"SASL://{HOST}:{sasl},TLS://{HOST}:{tls}",
        "listener.security.protocol.map": "SASL:SASL_SSL,TLS:SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": files["server"],
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": files["ca"],
        "listener.name.tls.ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/",
        "listener.name.sasl.sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
        "listener.name.sasl.scram-sha-512.sasl.jaas.config": f"{jaas}.scram.ScramLoginModule required;",
        "listener.name.sasl.plain.sasl.jaas.config": (
            f'{jaas}.plain.PlainLoginModule required user_{USER}="{quoted}";'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        **(properties or {}),
    }
    daemon = Daemon("kafka", "Kafka", folder)
    java, jars = require_java(), ensure_jars().broker
    scram = ["--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"]
    try:
        process = kafka_broker.start(
            daemon, java, jars, port, sasl, tls, more=more, format_options=scram
        )
        daemon.await_answer(process, lambda: kafka_broker.answers(port), kafka_broker.READY_SECONDS)
        yield SecureBroker(
            f"{HOST}:{port}",
            f"{HOST}:{sasl}",
            f"{HOST}:{tls}",
            files["ca"],
            files["other"],
            files["client"],
        )
    finally:
        if (running := daemon.process()) is not None:
            stop_all([running], 30)
