"""Each identity of `kafka.security`, translated for both clients, and what its source reports."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest
import token_server
from token_server import CLIENT, SCOPE, SECRET, TokenServer, running_token_server

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.config.kafka_security import TAGS
from anabranch.kafka.security import kafka_python_settings, spark_options
from anabranch.spark.settings import session_settings

ROOT = Path(__file__).resolve().parents[3]
JAAS = "kafka.sasl.jaas.config"
OAUTH = {
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.token.endpoint.url": "https://login.example.com/token",
    "sasl.oauthbearer.client.credentials.client.id": "jobs",
    "sasl.oauthbearer.client.credentials.client.secret": 'a"b\\c',
}
MSK = {"sasl.mechanism": "AWS_MSK_IAM", "aws.region": "eu-central-1"}
KERBEROS = {"sasl.mechanism": "GSSAPI", "security.protocol": "SASL_PLAINTEXT"}
ROLE = "arn:aws:iam::123456789012:role/jobs"


SECRET_KEY = "sasl.oauthbearer.client.credentials.client.secret"
TRUST_KEY = "sasl.oauthbearer.ssl.truststore.location"


def kafka(**security: Any) -> config.Kafka:
    return config.Kafka.model_validate({"bootstrap_servers": "b:1", "security": security})


def tokens(**security: Any) -> Any:
    """The source of the tokens of an identity, or of its contexts."""
    return kafka_python_settings(kafka(**security))["sasl_oauth_token_provider"]


OAUTH_OF_SCOPE = OAUTH | {"sasl.oauthbearer.scope": "s", "sasl.oauthbearer.extensions": "a=1,b=2"}
IDENTITIES: dict[str, dict[str, str]] = {
    "none": {}, "TLS": {"security.protocol": "SSL"},
    "PLAIN": {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": 'p"\\'},
    "SCRAM": {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "u", "sasl.password": "p"},
    "OAUTHBEARER": OAUTH_OF_SCOPE, "a profile of AWS": MSK | {"aws.profile": "kafka"},
    "a role of AWS": MSK | {"aws.role.arn": ROLE}, "Kerberos": KERBEROS,
}  # fmt: skip


@pytest.mark.parametrize("name", IDENTITIES)
def test_both_clients_get_an_identity(name: str, recorded: Callable[[Any], None]) -> None:
    one = kafka(**IDENTITIES[name])
    settings = kafka_python_settings(one).items()
    texts = {k: v if isinstance(v, str | None) else type(v).__name__ for k, v in settings}
    recorded({"Spark": spark_options(one), "kafka-python": texts})


def test_the_files_of_an_identity_reach_both_clients(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("ca.pem", "client.pem", "jobs.keytab", "krb5.conf")}
    for file in files.values():
        file.write_text("-----BEGIN")
    security = KERBEROS | {
        "ssl.truststore.location": str(files["ca.pem"]), "ssl.keystore.location": str(files["client.pem"]),
        "ssl.key.password": "k", "sasl.kerberos.principal": "jobs@EXAMPLE.COM",
        "sasl.kerberos.keytab": str(files["jobs.keytab"]), "java.security.krb5.conf": str(files["krb5.conf"]),
    }  # fmt: skip
    one = kafka(**security)
    options = spark_options(one)
    assert options["kafka.ssl.truststore.type"] == options["kafka.ssl.keystore.type"] == "PEM"
    assert options["kafka.ssl.key.password"] == "k"
    keytab = f'keyTab="{files["jobs.keytab"]}" principal="jobs@EXAMPLE.COM";'
    assert options[JAAS].endswith(f'useKeyTab="true" storeKey="true" {keytab}')
    settings = kafka_python_settings(one)
    assert settings["ssl_cafile"] == str(files["ca.pem"])
    assert (settings["ssl_certfile"], settings["ssl_password"]) == (str(files["client.pem"]), "k")
    for key in security.keys() & {"ssl.truststore.location", "sasl.kerberos.keytab"}:
        with pytest.raises(ConfigurationError, match=f"{key}: expected a file, found none"):
            kafka_python_settings(kafka(**security | {key: str(tmp_path / "none")}))


@pytest.mark.parametrize("content", [b"\xfe\xed\xfe\xed\0", b"\x30\x82\x01\x02"])
def test_a_java_key_stores_error_has_the_commands(tmp_path: Path, content: bytes) -> None:
    store = tmp_path / "store"
    store.write_bytes(content)
    found = r"found a Java key store; convert it: `keytool -l"
    with pytest.raises(ConfigurationError, match=found):
        kafka_python_settings(kafka(**{"ssl.truststore.location": str(store)}))


@pytest.mark.parametrize(
    ("security", "properties"),
    [
        (OAUTH, '-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls="https://login.example.com/token"'),
        (MSK, '-Daws.region="eu-central-1"'),
        (KERBEROS | {"java.security.krb5.conf": "/etc/krb 5.conf"}, '-Djava.security.krb5.conf="/etc/krb 5.conf"'),
    ],
)  # fmt: skip
def test_java_of_executors_gets_the_identity(security: dict[str, str], properties: str) -> None:
    catalog = {"name": "lake", "uri": "sqlite:///c.db", "warehouse": "s3://b/w"}
    conf = {"conf": {"spark.executor.extraJavaOptions": "-Xss4m"}}
    given = {"kafka": kafka(**security), "catalog": catalog, "spark": conf}
    settings = session_settings(config.Environment.model_validate(given))
    assert settings["spark.executor.extraJavaOptions"] == f"{properties} -Xss4m"


def tokens_of(server: TokenServer, **changes: str) -> Any:
    oauth = OAUTH | {
        "sasl.oauthbearer.token.endpoint.url": server.url, "sasl.oauthbearer.scope": SCOPE,
        "sasl.oauthbearer.client.credentials.client.id": CLIENT,
        SECRET_KEY: SECRET, TRUST_KEY: str(server.ca),
    }  # fmt: skip
    return tokens(**oauth | changes)


def test_clients_share_and_renew_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.kafka.security._RENEWED_AFTER", 0.0)
    with running_token_server(tmp_path, 60) as server:
        tokens_of(server).token()
        first = tokens_of(server).token()
        assert len(server.issued) == 2
        monkeypatch.setattr("anabranch.kafka.security._RENEWED_AFTER", 0.8)
        assert tokens_of(server).token().count(".") == first.count(".") == 2
        tokens_of(server).token()
        assert len(server.issued) == 3


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {SECRET_KEY: "wrong"},
            "found 401 .*invalid_client.*check kafka.security: .*client.secret",
        ),
        ({"sasl.oauthbearer.scope": "other"}, "found 400 .*invalid_scope.*oauthbearer.scope"),
        ({TRUST_KEY: token_server.__file__}, TRUST_KEY),
    ],
)
def test_a_mistake_in_credentials_ends(tmp_path: Path, changes: dict[str, str], found: str) -> None:
    error = pytest.raises(ConfigurationError, match=found)
    with running_token_server(tmp_path, 60) as server, error:
        tokens_of(server, **changes).token()


def test_a_token_server_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    with running_token_server(tmp_path, 60) as server:
        server.status = 503
        with pytest.raises(Transient, match="found 503"):
            tokens_of(server).token()
        server.status = 200
        assert tokens_of(server).token()
    with pytest.raises(Transient, match="refused"):
        tokens_of(server, **{"sasl.oauthbearer.client.credentials.client.id": "other"}).token()


def test_the_token_of_a_file_is_read_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "token"
    url = {"sasl.oauthbearer.token.endpoint.url": file.as_uri()}
    source = tokens(**{"sasl.mechanism": "OAUTHBEARER", **url})
    found = r"check kafka\.security: sasl\.oauthbearer\.token"
    with pytest.raises(ConfigurationError, match=found):
        source.token()
    for text in ("first", "second"):
        file.write_text(f"{text}\n")
        assert source.token() == text


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No keys of AWS; return the file of shared keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "credentials"


def aws_client(**more: str) -> Any:
    return tokens(**MSK | more).client("b-1.example.com")


def test_a_profile_signs_with_its_present_keys(no_keys: Path) -> None:
    check = "check kafka.security: aws.profile, aws.role.arn"
    with pytest.raises(ConfigurationError, match=f"found none; {check}"):
        aws_client()
    with pytest.raises(ConfigurationError, match=rf"\(kafka\) could not be found; {check}"):
        aws_client(**{"aws.profile": "kafka"})
    for key in ("one", "two"):
        no_keys.write_text(f"[kafka]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        client = aws_client(**{"aws.profile": "kafka"})
        assert (client.access_key, client.region) == (key, "eu-central-1")


def test_a_role_is_assumed_once_then_again(no_keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moto import mock_aws

    no_keys.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = s\n")
    with mock_aws():
        first = aws_client(**{"aws.role.arn": ROLE})
        assert first.token and first.access_key != "a"
        assert aws_client(**{"aws.role.arn": ROLE}).access_key == first.access_key
    no_keys.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
    assert botocore.session.Session().get_credentials() is not None
    with pytest.raises(Transient, match="load the keys of AWS"):
        aws_client(**{"aws.role.arn": ROLE + "2"})


def test_gssapi_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    source = tokens(**KERBEROS)
    with pytest.raises(ConfigurationError, match=r"pip install 'anabranch\[kerberos\]'"):
        source.context("kafka@b")


@pytest.mark.parametrize(
    ("text", "has_keytab", "kind"),
    [
        ("Cannot contact any KDC for realm 'R'", True, Transient),
        ("Ticket expired", True, Transient),
        ("Ticket expired", False, ConfigurationError),
        ("Client not found in Kerberos database", True, ConfigurationError),
    ],
)
def test_a_ticket_that_expired_is_asked_for_again_with_a_keytab_alone(
    text: str, has_keytab: bool, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(text)

    kinds = SimpleNamespace(kerberos_principal=1), SimpleNamespace(GSSError=OSError)
    gssapi = SimpleNamespace(Credentials=refuse, NameType=kinds[0], exceptions=kinds[1])
    gssapi.Name = lambda *_: "name"
    monkeypatch.setitem(sys.modules, "gssapi", gssapi)
    of_keytab = {"sasl.kerberos.keytab": __file__, "sasl.kerberos.principal": "p@R"}
    source = tokens(**KERBEROS | (of_keytab if has_keytab else {}))
    with pytest.raises(kind, match=text):
        source.context("kafka@b")


def test_the_page_of_services_has_each_key_of_each_mechanism() -> None:
    page = (ROOT / "docs/how-to/deploy/services.md").read_text()
    keys = {str(f.alias) for one in TAGS.values() for f in one.model_fields.values()}
    assert sorted(key for key in keys if f"`{key}`" not in page and f"{key}:" not in page) == []
