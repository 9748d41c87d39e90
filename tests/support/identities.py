"""One real broker with a listener for each identity of `kafka.security`, and the services that prove
them: a token server, a Kerberos KDC, and AWS's signatures. Tokens and tickets live `SECONDS`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerberos import SERVICE, USER, Realm, gssapi_folder, running_kdc
from programs import output_of
from secure_broker import ACCESS_KEY, SecureBroker, running_secure_broker
from servers import free_ports
from soak.interference import replace_file
from token_server import AUDIENCE, CLIENT, SCOPE, SECRET, TokenServer, running_token_server

from anabranch.dev.services.processes import HOST
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java

SECONDS = 30
PROFILE, REGION = "kafka", "eu-central-1"
NAMES = ("plain", "scram", "mutual", "oauth", "oauth-file", "msk", "kerberos")
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


@dataclass
class AwsKeys:
    """The keys of a profile of AWS, and the file of those that the broker accepts."""

    folder: Path
    number: int = 0

    @property
    def accepted(self) -> Path:
        return self.folder / "msk-keys"

    @property
    def shared(self) -> Path:
        return self.folder / "credentials"

    def renew(self) -> None:
        """Replace the temporary keys; the broker accepts only the new ones."""
        self.number += 1
        secret, token = f"secret-{self.number}", f"token-{self.number}"
        replace_file(self.accepted, f"{ACCESS_KEY} {secret} {token}\n")
        keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n"
        replace_file(self.shared, f"[{PROFILE}]\n{keys}aws_session_token = {token}\n")


@dataclass(frozen=True)
class Identities:
    broker: SecureBroker
    tokens: TokenServer
    realm: Realm
    keys: AwsKeys

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that use the identities."""
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(gssapi_folder()))))
        return {"AWS_SHARED_CREDENTIALS_FILE": str(self.keys.shared), "PYTHONPATH": path}


def _compiled(source: Path, into: Path) -> Path:
    jars = os.pathsep.join(map(str, ensure_jars().broker))
    output_of(require_java().with_name("javac"), "-d", into, "-cp", jars, source, seconds=120)
    return into


def _sasl(name: str, mechanism: str, jaas: str) -> dict[str, str]:
    own = f"listener.name.{name}.{mechanism.lower()}"
    return {
        f"listener.name.{name}.sasl.enabled.mechanisms": mechanism,
        f"{own}.sasl.jaas.config": f"{jaas};",
        f"{own}.connections.max.reauth.ms": str(SECONDS * 1000 // 3),
    }


@contextmanager
def running_identities(folder: Path) -> Iterator[Identities]:
    """Run the broker and its services within a `with`."""
    keys = AwsKeys(folder)
    folder.mkdir(parents=True, exist_ok=True)
    keys.renew()
    ports = free_ports(3)
    classes = _compiled(Path(__file__).with_name("MskIam.java"), folder / "classes")
    with (
        running_token_server(folder / "tokens", SECONDS) as tokens,
        running_kdc(folder / "kdc", SECONDS) as realm,
        running_secure_broker(
            folder / "broker",
            _properties(tokens, realm, *ports),
            [classes],
            f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={tokens.jwks.as_uri()} "
            f"-Djava.security.krb5.conf={realm.conf} -Dmsk.iam.keys={keys.accepted}",
            _sections(tokens, realm, *ports),
        ) as broker,
    ):
        yield Identities(broker, tokens, realm, keys)


def _properties(
    tokens: TokenServer, realm: Realm, oauth: int, kerberos: int, msk: int
) -> dict[str, str]:
    own = "listener.name.oauth.oauthbearer.sasl"
    listeners = f"OAUTH://{HOST}:{oauth},MSK://{HOST}:{msk}"
    return {
        "listeners": f"{listeners},KERBEROS://{HOST}:{kerberos}",
        "advertised.listeners": f"{listeners},KERBEROS://localhost:{kerberos}",
        "listener.security.protocol.map": ("OAUTH:SASL_SSL,MSK:SASL_SSL,KERBEROS:SASL_PLAINTEXT"),
        **_sasl("oauth", "OAUTHBEARER", f"{_OAUTH}.OAuthBearerLoginModule required"),
        f"{own}.server.callback.handler.class": f"{_OAUTH}.OAuthBearerValidatorCallbackHandler",
        f"{own}.oauthbearer.jwks.endpoint.url": tokens.jwks.as_uri(),
        f"{own}.oauthbearer.expected.audience": AUDIENCE,
        f"{own}.oauthbearer.expected.issuer": tokens.url,
        **_sasl(
            "kerberos",
            "GSSAPI",
            "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true "
            f'keyTab="{realm.service_keytab}" principal="{SERVICE}"',
        ),
        "sasl.kerberos.service.name": "kafka",
        "security.providers": "MskIam",
        **_sasl(
            "msk", "AWS_MSK_IAM", "org.apache.kafka.common.security.plain.PlainLoginModule required"
        ),
    }


def _sections(
    tokens: TokenServer, realm: Realm, oauth: int, kerberos: int, msk: int
) -> dict[str, dict[str, Any]]:
    bearer = {"sasl.mechanism": "OAUTHBEARER"}
    return {
        "oauth": {
            "bootstrap_servers": f"{HOST}:{oauth}",
            "security": bearer
            | {
                "sasl.oauthbearer.token.endpoint.url": tokens.url,
                "sasl.oauthbearer.client.credentials.client.id": CLIENT,
                "sasl.oauthbearer.client.credentials.client.secret": SECRET,
                "sasl.oauthbearer.scope": SCOPE,
                "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-1",
                "sasl.oauthbearer.ssl.truststore.location": str(tokens.ca),
            },
        },
        "oauth-file": {
            "bootstrap_servers": f"{HOST}:{oauth}",
            "security": bearer | {"sasl.oauthbearer.token.endpoint.url": tokens.file.as_uri()},
        },
        "msk": {
            "bootstrap_servers": f"{HOST}:{msk}",
            "security": {
                "sasl.mechanism": "AWS_MSK_IAM",
                "aws.region": REGION,
                "aws.profile": PROFILE,
            },
        },
        "kerberos": {
            "bootstrap_servers": f"localhost:{kerberos}",
            "security": {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "GSSAPI",
                "sasl.kerberos.principal": USER,
                "sasl.kerberos.keytab": str(realm.keytab),
                "java.security.krb5.conf": str(realm.conf),
            },
        },
    }
