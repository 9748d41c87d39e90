"""`kafka.security`: the identity with which both clients of Kafka authenticate, one class for each
mechanism. The keys are Kafka's own names of client properties, and names of Java's system
properties where Kafka has none.

Each class translates itself: `for_java` for Spark's client (kafka-clients 3.9), `for_python` for
kafka-python, `system_properties` for Java's process. If an identity is refused, the error has its
`keys_to_check`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationInfo,
    model_validator,
)

from anabranch.config.base import Frozen

_JAAS = "org.apache.kafka.common.security"
_OAUTH = "sasl.oauthbearer"
_CLIENT = f"{_OAUTH}.client.credentials.client"
# Kafka's rule (OAuthBearerClientInitialResponse).
_TOKEN_SOURCE = re.compile(r"https?://[^/@\s?#]+(/[^@\s#]*)?|file:///\S+")
_EXTENSION = re.compile(r"[a-zA-Z]+=[\x21-\x2b\x2d-\x7e]+")
MSK_PACKAGE = "software.amazon.msk.auth.iam"
_STORES = frozenset({".jks", ".p12", ".pfx", ".keystore", ".truststore"})
_OF_STORES = re.compile(r"ssl\.(truststore|keystore)\.(type|password)")
_RENAMED = {
    "sasl.jaas.config": "the keys of its mechanism, which both clients understand",
    "sasl.login.callback.handler.class": "no class: sasl.mechanism selects it",
    "sasl.client.callback.handler.class": "no class: sasl.mechanism selects it",
    "sasl.oauthbearer.client.id": f"{_CLIENT}.id",
    "sasl.oauthbearer.client.secret": f"{_CLIENT}.secret",
}


def to_pem(key: str) -> str:
    """Return the commands that convert a Java key store to the PEM file of a key. Pure."""
    if "keystore" in key:
        return (
            "`keytool -importkeystore -srckeystore STORE -destkeystore client.p12 -deststoretype "
            "PKCS12`, then `openssl pkcs12 -in client.p12 -nodes -out client.pem`"
        )
    return "`keytool -list -rfc -keystore STORE > ca.pem`"


def _no_store(value: str, info: ValidationInfo) -> str:
    if PurePath(value).suffix.lower() in _STORES:
        convert = to_pem(str(info.field_name))
        raise ValueError(f"expected a PEM file, found a Java key store; convert it: {convert}")
    return value


Pem = Annotated[str, Field(min_length=1), AfterValidator(_no_store)]


def _token_source(value: str) -> str:
    if not _TOKEN_SOURCE.fullmatch(value):
        raise ValueError(
            "expected a URL without user such as 'https://login.example.com/oauth2/token', or a "
            "file such as 'file:///var/run/secrets/token'"
        )
    return value


def _jaas(module: str, **options: str | None) -> dict[str, str]:
    """Return the property with Java's login module and its options; underscores are dots."""
    given = {name.replace("__", "."): value for name, value in options.items() if value}
    words = [f'{name}="{_quoted(value)}"' for name, value in given.items()]
    return {"sasl.jaas.config": f"{' '.join([module, 'required', *words])};"}


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


class Connection(Frozen):
    """TLS of every identity, and a certificate of the client for mutual TLS."""

    keys_to_check: ClassVar[str] = "ssl.keystore.location, ssl.truststore.location"

    protocol: str = Field(alias="security.protocol")
    truststore: Pem | None = Field(default=None, alias="ssl.truststore.location")
    keystore: Pem | None = Field(default=None, alias="ssl.keystore.location")
    key_password: SecretStr | None = Field(default=None, alias="ssl.key.password")

    @property
    def files(self) -> dict[str, str]:
        """The files that this identity reads, by key."""
        return {
            str(field.alias): value
            for name, field in type(self).model_fields.items()
            if name in ("truststore", "keystore", "ca", "keytab", "krb5_conf")
            and (value := getattr(self, name))
        }

    def for_java(self) -> dict[str, str]:
        """Return the Java client's properties."""
        stores = {"truststore": self.truststore, "keystore": self.keystore}
        properties = {"security.protocol": self.protocol}
        for store, file in stores.items():
            if file is not None:
                properties |= {f"ssl.{store}.type": "PEM", f"ssl.{store}.location": file}
        if self.key_password is not None:
            properties["ssl.key.password"] = self.key_password.get_secret_value()
        return properties

    def for_python(self) -> dict[str, Any]:
        """Return kafka-python's arguments."""
        given = {"ssl_cafile": self.truststore, "ssl_certfile": self.keystore}
        if self.key_password is not None:
            given["ssl_password"] = self.key_password.get_secret_value()
        return {"security_protocol": self.protocol} | {k: v for k, v in given.items() if v}

    def system_properties(self) -> dict[str, str]:
        """Return the system properties that Java needs, on the driver and on executors."""
        return {}


class Tls(Connection):
    """A connection without SASL."""

    protocol: Literal["SSL", "PLAINTEXT"] = Field(default="SSL", alias="security.protocol")


class _Sasl(Connection):
    protocol: Literal["SASL_SSL", "SASL_PLAINTEXT"] = Field(
        default="SASL_SSL", alias="security.protocol"
    )
    mechanism: str = Field(alias="sasl.mechanism")

    def for_java(self) -> dict[str, str]:
        return super().for_java() | {"sasl.mechanism": self.mechanism}

    def for_python(self) -> dict[str, Any]:
        return super().for_python() | {"sasl_mechanism": self.mechanism}


class Password(_Sasl):
    keys_to_check: ClassVar[str] = "sasl.username, sasl.password"

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(alias="sasl.mechanism")
    username: str = Field(min_length=1, alias="sasl.username")
    password: SecretStr = Field(alias="sasl.password")

    def for_java(self) -> dict[str, str]:
        kind = "plain.Plain" if self.mechanism == "PLAIN" else "scram.Scram"
        password = self.password.get_secret_value()
        module = f"{_JAAS}.{kind}LoginModule"
        return super().for_java() | _jaas(module, username=self.username, password=password)

    def for_python(self) -> dict[str, Any]:
        password = self.password.get_secret_value()
        named = {"sasl_plain_username": self.username, "sasl_plain_password": password}
        return super().for_python() | named


class OAuth(_Sasl):
    """A bearer token: of a token server, or of a file that another program renews."""

    keys_to_check: ClassVar[str] = f"{_CLIENT}.id, {_CLIENT}.secret, {_OAUTH}.scope"

    mechanism: Literal["OAUTHBEARER"] = Field(alias="sasl.mechanism")
    endpoint: Annotated[str, AfterValidator(_token_source)] = Field(
        alias=f"{_OAUTH}.token.endpoint.url"
    )
    client_id: str | None = Field(default=None, min_length=1, alias=f"{_CLIENT}.id")
    client_secret: SecretStr | None = Field(default=None, alias=f"{_CLIENT}.secret")
    scope: str | None = Field(default=None, min_length=1, alias=f"{_OAUTH}.scope")
    extensions: str | None = Field(default=None, alias=f"{_OAUTH}.extensions")
    ca: Pem | None = Field(default=None, alias=f"{_OAUTH}.ssl.truststore.location")

    @model_validator(mode="after")
    def _one_source(self) -> OAuth:
        credentials = (self.client_id, self.client_secret)
        if self.token_file is None and None in credentials:
            raise ValueError(
                f"expected {_CLIENT}.id and {_CLIENT}.secret for the token server, found "
                f"{'neither' if credentials == (None, None) else 'one of them'}"
            )
        if self.token_file is not None and {*credentials, self.scope, self.ca} != {None}:
            raise ValueError(
                f"expected no {_CLIENT}.id, {_CLIENT}.secret, {_OAUTH}.scope and "
                f"{_OAUTH}.ssl.truststore.location with the file of a token, found one of them"
            )
        if any(not _EXTENSION.fullmatch(one) for one in (self.extensions or "a=b").split(",")):
            raise ValueError(
                f"expected {_OAUTH}.extensions of the form name=value,name=value, found another"
            )
        return self

    @property
    def token_file(self) -> str | None:
        """The file with the token, None for a token server."""
        found = self.endpoint.removeprefix("file://")
        return found if found != self.endpoint else None

    def named_extensions(self) -> dict[str, str]:
        """Return the SASL extensions (KIP-342), which Confluent Cloud needs."""
        return {
            name: value
            for one in (self.extensions or "").split(",")
            for name, _, value in [one.partition("=")]
            if name
        }

    def for_java(self) -> dict[str, str]:
        secret = self.client_secret.get_secret_value() if self.client_secret is not None else None
        extensions = {f"extension_{name}": v for name, v in self.named_extensions().items()}
        return (
            super().for_java()
            | {
                f"{_OAUTH}.token.endpoint.url": self.endpoint,
                "sasl.login.callback.handler.class": (
                    f"{_JAAS}.oauthbearer.OAuthBearerLoginCallbackHandler"
                ),
                # Java waits for a silent token server without limit by default.
                "sasl.login.connect.timeout.ms": "5000",
                "sasl.login.read.timeout.ms": "15000",
            }
            | _jaas(
                f"{_JAAS}.oauthbearer.OAuthBearerLoginModule",
                clientId=self.client_id,
                clientSecret=secret,
                scope=self.scope,
                ssl__truststore__type="PEM" if self.ca else None,
                ssl__truststore__location=self.ca,
                **extensions,
            )
        )

    def system_properties(self) -> dict[str, str]:
        # Clients from Kafka 4.0 on ask no other address (KIP-768, CVE-2025-27817).
        return {f"org.apache.kafka.{_OAUTH}.allowed.urls": self.endpoint}


class MskIam(_Sasl):
    """A role or user of AWS, for Amazon MSK: the keys of AWS's default credentials chain, of a
    profile, or of a role that the chain's keys assume."""

    keys_to_check: ClassVar[str] = (
        "aws.profile, aws.role.arn, aws.region, and the policy of these keys"
    )

    protocol: Literal["SASL_SSL"] = Field(default="SASL_SSL", alias="security.protocol")
    mechanism: Literal["AWS_MSK_IAM"] = Field(alias="sasl.mechanism")
    region: str = Field(pattern="^[a-z0-9-]+$", alias="aws.region")
    profile: str | None = Field(default=None, min_length=1, alias="aws.profile")
    role: str | None = Field(default=None, pattern="^arn:aws[a-z-]*:iam::", alias="aws.role.arn")

    @model_validator(mode="after")
    def _one_identity(self) -> MskIam:
        # Java would use the profile's own keys, so another identity than kafka-python.
        if self.profile and self.role:
            raise ValueError(
                "expected aws.profile or aws.role.arn, found both; name the role in the profile "
                "(role_arn), which both clients assume"
            )
        return self

    def for_java(self) -> dict[str, str]:
        return (
            super().for_java()
            | {"sasl.client.callback.handler.class": f"{MSK_PACKAGE}.IAMClientCallbackHandler"}
            | _jaas(
                f"{MSK_PACKAGE}.IAMLoginModule",
                awsProfileName=self.profile,
                awsRoleArn=self.role,
                awsRoleSessionName="anabranch" if self.role else None,
                awsStsRegion=self.region if self.role else None,
                # Java would take other keys that it finds, so another identity.
                awsAddDefaultProviders="false" if self.profile or self.role else None,
            )
        )

    def system_properties(self) -> dict[str, str]:
        # Without it, Java waits for the metadata service of EC2.
        return {"aws.region": self.region}


class Kerberos(_Sasl):
    """A Kerberos principal: by a keytab, or by the ticket cache of the process."""

    keys_to_check: ClassVar[str] = (
        "sasl.kerberos.principal, sasl.kerberos.keytab, sasl.kerberos.service.name, "
        "java.security.krb5.conf"
    )

    mechanism: Literal["GSSAPI"] = Field(alias="sasl.mechanism")
    service: str = Field(default="kafka", min_length=1, alias="sasl.kerberos.service.name")
    principal: str | None = Field(default=None, min_length=1, alias="sasl.kerberos.principal")
    keytab: str | None = Field(default=None, min_length=1, alias="sasl.kerberos.keytab")
    krb5_conf: str | None = Field(default=None, min_length=1, alias="java.security.krb5.conf")

    @model_validator(mode="after")
    def _principal_of_keytab(self) -> Kerberos:
        if self.keytab is not None and self.principal is None:
            raise ValueError(
                "expected sasl.kerberos.principal, whose key sasl.kerberos.keytab has, found none"
            )
        return self

    def for_java(self) -> dict[str, str]:
        key = {"useKeyTab": "true", "storeKey": "true", "keyTab": self.keytab}
        return (
            super().for_java()
            | {
                "sasl.kerberos.service.name": self.service,
                # Java renews no ticket that lives shorter than this, a minute by default.
                "sasl.kerberos.min.time.before.relogin": "5000",
            }
            | _jaas(
                "com.sun.security.auth.module.Krb5LoginModule",
                **(key if self.keytab is not None else {"useTicketCache": "true"}),
                principal=self.principal,
            )
        )

    def for_python(self) -> dict[str, Any]:
        return super().for_python() | {"sasl_kerberos_service_name": self.service}

    def system_properties(self) -> dict[str, str]:
        return {} if self.krb5_conf is None else {"java.security.krb5.conf": self.krb5_conf}


_NO_SASL = "no SASL"
_CLASSES: dict[str, type[Connection]] = {
    _NO_SASL: Tls,
    "PLAIN": Password,
    "SCRAM-SHA-256": Password,
    "SCRAM-SHA-512": Password,
    "OAUTHBEARER": OAuth,
    "AWS_MSK_IAM": MskIam,
    "GSSAPI": Kerberos,
}
TAGS = {one.__name__: one for one in _CLASSES.values()}
"""The classes by their tags, which Pydantic adds to the location of a mistake."""


def _prepare(value: Any) -> Any:
    """Return the section, None for an empty one. Raises ValueError for keys of other clients."""
    if not isinstance(value, Mapping):
        return value
    for key in map(str, value):
        if key in _RENAMED:
            raise ValueError(f"expected {_RENAMED[key]}, found {key}")
        if store := _OF_STORES.fullmatch(key):
            raise ValueError(f"expected PEM files, found {key}; convert: {to_pem(store[1])}")
    mechanism = value.get("sasl.mechanism", _NO_SASL)
    if mechanism not in _CLASSES:
        names = ", ".join(name for name in _CLASSES if name != _NO_SASL)
        raise ValueError(f"expected sasl.mechanism to be one of {names}, found {mechanism!r}")
    return value or None


def _tag(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return _CLASSES[value.get("sasl.mechanism", _NO_SASL)].__name__
    return type(value).__name__ if isinstance(value, Connection) else None


Security = Annotated[
    Annotated[
        Annotated[Tls, Tag("Tls")]
        | Annotated[Password, Tag("Password")]
        | Annotated[OAuth, Tag("OAuth")]
        | Annotated[MskIam, Tag("MskIam")]
        | Annotated[Kerberos, Tag("Kerberos")],
        Discriminator(_tag),
    ]
    | None,
    BeforeValidator(_prepare),
]
"""`kafka.security`: an identity, None for connections without TLS and user."""
