"""`kafka.security` for both clients: Spark's options, and kafka-python's arguments with the keys,
tokens and tickets that it renews.

kafka-python passes to its SASL mechanisms only settings that it knows. So the source of an identity
is its `sasl_oauth_token_provider`, for OAUTHBEARER as for the other mechanisms. Errors of a source
are Anabranch's, which `client_errors` finds in kafka-python's log.
"""

from __future__ import annotations

import os
import threading
import time
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from kafka.net.sasl import register_sasl_mechanism
from kafka.net.sasl.gssapi import SaslMechanismGSSAPI
from kafka.net.sasl.msk import AwsMskIamClient, SaslMechanismAwsMskIam
from kafka.net.sasl.oauth import AbstractTokenProvider

from anabranch.common import http
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.remote_errors import Meaning, classify
from anabranch.config import Kafka
from anabranch.config.kafka_security import Connection, Kerberos, MskIam, OAuth, to_pem

_SECONDS = 15.0
# A token is renewed when this part of its life is over, as Java does.
_RENEWED_AFTER = 0.8
# Java's own stores: JKS, JCEKS, and PKCS 12 in DER.
_STORES = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce", b"\x30\x82")
_SOURCE = "sasl_oauth_token_provider"


def kafka_python_settings(kafka: Kafka) -> dict[str, Any]:
    """Return kafka-python's arguments. Raises ConfigurationError for a missing file."""
    settings: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap_servers.split(",")}
    if kafka.security is None:
        return settings
    _require_files(kafka.security)
    source = _source_of(kafka.security)
    return settings | kafka.security.for_python() | ({_SOURCE: source} if source else {})


def spark_options(kafka: Kafka) -> dict[str, str]:
    """Return Java's client properties for the brokers, as options of Spark's Kafka source."""
    properties = kafka.security.for_java() if kafka.security is not None else {}
    if token := token_digest(kafka):
        # Java reads the file of a token once for each text of this property.
        jaas = properties["sasl.jaas.config"].removesuffix(";")
        properties["sasl.jaas.config"] = f'{jaas} token="{token}";'
    options = {f"kafka.{key}": value for key, value in properties.items()}
    return {"kafka.bootstrap.servers": kafka.bootstrap_servers} | options


def token_digest(kafka: Kafka) -> str:
    """Return a digest of the token in its file; empty without an identity's file."""
    security = kafka.security
    if not isinstance(security, OAuth) or security.token_file is None:
        return ""
    try:
        return sha256(_token_in(Path(security.token_file)).encode()).hexdigest()[:16]
    except ConfigurationError:
        return ""


def _require_files(security: Connection) -> None:
    for key, file in security.files.items():
        if not Path(file).is_file():
            raise ConfigurationError(f"kafka.security: {key}: expected a file, found none")
        with Path(file).open("rb") as opened:
            first = opened.read(4)
        if key.startswith("ssl.") and first.startswith(_STORES):
            raise ConfigurationError(
                f"kafka.security: {key}: expected a PEM file, found a Java key store; convert it: "
                f"{to_pem(key)}"
            )


@cache
def _source_of(security: Connection) -> Any:
    """Return the source of an identity's tokens, keys or tickets; clients of one identity share it.
    None if the identity has none."""
    match security:
        case OAuth():
            return Tokens(security)
        case MskIam():
            return AwsKeys(security)
        case Kerberos():
            return Tickets(security)
    return None


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Bearer tokens of a token server (RFC 6749, section 4.4), each used for a part of its life, or
    the token of a file, read for each connection."""

    def __init__(self, security: OAuth) -> None:
        self._security = security
        self._lock = threading.Lock()
        self._token, self._renew_at = "", 0.0

    def token(self) -> str:
        """Return a valid token. Raises ConfigurationError for refused credentials or a missing
        file, Transient if the token server does not answer."""
        if self._security.token_file is not None:
            return _token_in(Path(self._security.token_file))
        with self._lock:
            if time.monotonic() >= self._renew_at:
                asked = time.monotonic()
                self._token, seconds = self._request()
                self._renew_at = asked + _RENEWED_AFTER * seconds
            return self._token

    def extensions(self) -> dict[str, str]:
        return self._security.named_extensions()

    def _request(self) -> tuple[str, float]:
        security = self._security
        assert security.client_id is not None and security.client_secret is not None
        doing, url_key = f"ask {security.endpoint} for a token", _key_of(security, "endpoint")
        credentials = f"{security.client_id}:{security.client_secret.get_secret_value()}"
        basic = f"Basic {b64encode(credentials.encode()).decode()}"
        session = http.open_session(url_key, basic)
        scope = {"scope": security.scope} if security.scope is not None else {}
        answer = http.request(
            session,
            "POST",
            security.endpoint,
            doing,
            f"kafka.security: {url_key}",
            _key_of(security, "ca"),
            _SECONDS,
            data={"grant_type": "client_credentials"} | scope,
            **({"verify": security.ca} if security.ca else {}),
        )
        found = f"{answer.status_code} {answer.text[:200]}".strip()
        if http.is_transient(answer.status_code):
            raise Transient(f"{doing}: expected a token, found {found} (transient, try again)")
        try:
            token, seconds = answer.json()["access_token"], answer.json().get("expires_in", 60)
        except (ValueError, KeyError, TypeError, AttributeError):
            # 400 is RFC 6749's answer to a wrong scope, and with 401 to wrong credentials.
            raise ConfigurationError(
                f"{doing}: expected a token, found {found}; check kafka.security: "
                f"{security.keys_to_check}"
            ) from None
        return str(token), float(seconds)


def _token_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"read the token of {file}: expected a token, found {error}; check kafka.security: "
            f"{_key_of(OAuth, 'endpoint')}, and the program that writes the file"
        ) from error


def _key_of(security: OAuth | type[OAuth], name: str) -> str:
    kind = security if isinstance(security, type) else type(security)
    return str(kind.model_fields[name].alias)


class AwsKeys:
    """Keys of AWS for each connection: of the default credentials chain, a profile, or a role."""

    def __init__(self, security: MskIam) -> None:
        self._security = security
        # Of assumed roles, until they expire.
        self._cache: dict[str, Any] = {}

    def client(self, host: str) -> Any:
        """Return what signs a connection to a broker. Raises ConfigurationError without keys,
        Transient if STS does not answer."""
        from botocore.exceptions import BotoCoreError, ClientError

        doing, check = (
            "load the keys of AWS",
            f"check kafka.security: {self._security.keys_to_check}",
        )
        try:
            keys = self._load()
        except (BotoCoreError, ClientError) as error:
            if classify(error) is Meaning.PASSES:
                raise Transient(f"{doing}: {error} (transient, try again)") from error
            raise ConfigurationError(f"{doing}: {error}; {check}") from error
        if keys is None:
            raise ConfigurationError(
                f"{doing}: expected them in AWS's default credentials chain (environment, shared "
                f"files, role of the machine), found none; {check}"
            )
        return AwsMskIamClient(
            host, keys.access_key, keys.secret_key, self._security.region, token=keys.token
        )

    def _load(self) -> Any:
        from botocore.credentials import AssumeRoleCredentialFetcher, ReadOnlyCredentials
        from botocore.session import Session

        # A new session reads the shared files again, which may have new keys.
        session = Session(profile=self._security.profile)
        session.set_config_variable("region", self._security.region)
        keys = session.get_credentials()
        if keys is None or self._security.role is None:
            return keys and keys.get_frozen_credentials()
        fetcher = AssumeRoleCredentialFetcher(
            session.create_client,
            keys,
            self._security.role,
            extra_args={"RoleSessionName": "anabranch"},
            cache=self._cache,
        )
        found = fetcher.fetch_credentials()
        return ReadOnlyCredentials(found["access_key"], found["secret_key"], found["token"])


class _MskIam(SaslMechanismAwsMskIam):  # type: ignore[misc]
    """kafka-python's AWS_MSK_IAM with the keys of the configured profile, role and region."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._keys = config[_SOURCE]

    def _build_client(self) -> Any:
        return self._keys.client(self.host)


class Tickets:
    """Kerberos tickets, of a keytab, for which MIT Kerberos renews them, or of the ticket cache."""

    def __init__(self, security: Kerberos) -> None:
        self._security = security

    def context(self, service: str) -> Any:
        """Return a security context for `kafka@host`. Raises ConfigurationError without gssapi."""
        security = self._security
        if security.krb5_conf is not None:
            os.environ["KRB5_CONFIG"] = security.krb5_conf
        try:
            import gssapi
        except (ImportError, OSError) as error:
            raise ConfigurationError(
                "kafka.security: sasl.mechanism GSSAPI: expected the package gssapi, found "
                f"{error}; run `pip install 'anabranch[kerberos]'`, which needs the files of MIT "
                "Kerberos (libkrb5-dev)"
            ) from error
        store = {"client_keytab": security.keytab, "ccache": f"MEMORY:{security.principal}"}
        user = security.principal and gssapi.Name(
            security.principal, gssapi.NameType.kerberos_principal
        )
        try:
            credentials = gssapi.Credentials(
                name=user, usage="initiate", store=store if security.keytab is not None else None
            )
            name = gssapi.Name(service, gssapi.NameType.hostbased_service)
            context = gssapi.SecurityContext(
                name=name.canonicalize(gssapi.MechType.kerberos),
                creds=credentials,
                usage="initiate",
            )
            return context, context.step(None)
        except gssapi.exceptions.GSSError as error:
            raise _kerberos_error(security, service, error) from error


def _kerberos_error(security: Kerberos, service: str, error: Exception) -> Exception:
    doing = f"get a Kerberos ticket for {service}"
    # A ticket that expires before its use: the next one is of the keytab. A cache has no other.
    has_expired = security.keytab is not None and "Ticket expired" in str(error)
    if has_expired or "Cannot contact any KDC" in str(error):
        return Transient(f"{doing}: {error} (transient, try again)")
    return ConfigurationError(f"{doing}: {error}; check kafka.security: {security.keys_to_check}")


class _Gssapi(SaslMechanismGSSAPI):  # type: ignore[misc]
    """kafka-python's GSSAPI with the configured principal and keytab."""

    def __init__(self, **config: Any) -> None:
        self._is_done = self._is_authenticated = False
        self.auth_id = f"{config['sasl_kerberos_service_name']}@{config['host']}"
        self._client_ctx, self._next_token = config[_SOURCE].context(self.auth_id)


register_sasl_mechanism("AWS_MSK_IAM", _MskIam, overwrite=True)
register_sasl_mechanism("GSSAPI", _Gssapi, overwrite=True)
