"""A Kafka broker with ACLs that requires TLS, a password or a client certificate."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kafka_admin
import trustme
from cryptography.hazmat.primitives import serialization
from kafka.admin import ACLOperation, ResourceType
from servers import free_ports

from anabranch.dev.services import kafka_broker
from anabranch.dev.services.processes import HOST, Daemon, stop_all
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java

USER, PASSWORD = "alice", 'pass"word\\with;all'
CLIENT = "reader"
ACCESS_KEY = "AKIATEST"  # of AWS_MSK_IAM
USERS = (USER, CLIENT, ACCESS_KEY, "anabranch")
_LISTS = ("listeners", "advertised.listeners", "listener.security.protocol.map")


@dataclass(frozen=True)
class SecureBroker:
    """A running broker: the addresses of its three listeners, and the files that a client needs."""

    plain: str
    sasl: str
    tls: str
    ca: Path
    other_ca: Path
    client: Path
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The `kafka` sections of identities at further listeners."""

    def security(self, how: str, **changes: str | None) -> dict[str, Any]:
        """Return the `kafka` section for `scram`, `plain`, `mutual` (TLS) or one of `sections`."""
        section = self.sections.get(how) or self._section(how)
        keys = section["security"] | changes
        return section | {"security": {k: v for k, v in keys.items() if v is not None}}

    def _section(self, how: str) -> dict[str, Any]:
        common = {"ssl.truststore.location": str(self.ca)}
        if how == "mutual":
            properties = {"security.protocol": "SSL", "ssl.keystore.location": str(self.client)}
            return {"bootstrap_servers": self.tls, "security": common | properties}
        mechanism = {"scram": "SCRAM-SHA-512", "plain": "PLAIN"}[how]
        properties = {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism}
        properties |= {"sasl.username": USER, "sasl.password": PASSWORD}
        return {"bootstrap_servers": self.sasl, "security": common | properties}

    def allow(self, topic: str, group: str) -> None:
        kafka_admin.grant_reading(self.plain, USERS, topic, group)

    def grant(
        self, kind: ResourceType, name: str, *operations: ACLOperation, users: Sequence[str] = USERS
    ) -> None:
        """Grant users these operations."""
        kafka_admin.grant(self.plain, users, kind, name, *operations)


def _with_ca(section: dict[str, Any], ca: Path) -> dict[str, Any]:
    if section["security"].get("security.protocol") == "SASL_PLAINTEXT":
        return section
    return section | {"security": section["security"] | {"ssl.truststore.location": str(ca)}}


def _write(certificate: trustme.LeafCert, file: Path) -> None:
    """Write key and chain into one file; Java reads only keys in PKCS 8."""
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    encoded = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    file.write_bytes(encoded + b"".join(pem.bytes() for pem in certificate.cert_chain_pems))


@contextmanager
def running_secure_broker(
    folder: Path,
    properties: Mapping[str, str] | None = None,
    classes: Sequence[Path] = (),
    java_options: str = "",
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> Iterator[SecureBroker]:
    """Run a new broker within a `with`, with more `properties`, and `classes` on its path."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, other = trustme.CA(), trustme.CA()
    server = authority.issue_cert(HOST)
    client = authority.issue_cert(f"{CLIENT}@example.org", common_name=CLIENT)
    files = {name: folder / f"{name}.pem" for name in ("ca", "other", "server", "client")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    other.cert_pem.write_to_path(str(files["other"]))
    _write(server, files["server"])
    _write(client, files["client"])
    port, sasl, tls = free_ports(3)
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
    }
    for key, value in (properties or {}).items():
        more[key] = f"{more[key]},{value}" if key in _LISTS else value
    daemon = Daemon("kafka", "Kafka", folder)
    java, jars = require_java(), ensure_jars().broker
    scram = ["--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"]
    try:
        with patch.dict(os.environ, {"JAVA_TOOL_OPTIONS": java_options} if java_options else {}):
            process = kafka_broker.start(
                daemon, java, [*jars, *classes], port, sasl, tls, more=more, format_options=scram
            )
        daemon.await_answer(process, lambda: kafka_broker.answers(port), kafka_broker.READY_SECONDS)
        addresses = [f"{HOST}:{at}" for at in (port, sasl, tls)]
        paths = [files[name] for name in ("ca", "other", "client")]
        more_of = {name: _with_ca(one, files["ca"]) for name, one in (sections or {}).items()}
        yield SecureBroker(*addresses, *paths, more_of)
    finally:
        if (running := daemon.process()) is not None:
            stop_all([running], 30)
