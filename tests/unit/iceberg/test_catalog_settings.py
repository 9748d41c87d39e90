"""The catalog's address for both clients, with time-outs that let a job say that it waits."""

import re
import socket
import sys
from typing import Any

import pytest

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.iceberg import catalog_settings
from anabranch.iceberg.catalog_settings import catalog_properties, jdbc_properties, with_timeouts
from anabranch.iceberg.lake import Lake
from anabranch.spark.settings import session_settings


def test_an_sqlite_client_waits_for_a_lock_as_long_as_the_other_unless_the_address_says_so() -> (
    None
):
    assert with_timeouts("sqlite:////a/catalog.db") == "sqlite:////a/catalog.db?timeout=10"
    expected = {"uri": "jdbc:sqlite:/a/catalog.db", "jdbc.busy_timeout": "10000"}
    assert jdbc_properties("sqlite:////a/catalog.db") == expected
    assert with_timeouts("sqlite:///c.db?timeout=1") == "sqlite:///c.db?timeout=1"
    expected = "connect_timeout=60&keepalives_idle"
    assert expected in with_timeouts("postgresql+psycopg2://h/db?connect_timeout=60")
    assert with_timeouts("http://h:8181") == "http://h:8181"
    with pytest.raises(ConfigurationError, match="expected sqlite"):
        jdbc_properties("mysql://h/db")


def test_both_clients_of_postgresql_have_the_settings_of_the_address() -> None:
    uri = "postgresql+psycopg2://u:p@h:5433/db"
    assert with_timeouts(uri).startswith(f"{uri}?connect_timeout=5&keepalives_idle=10&")
    properties = jdbc_properties(uri)
    assert properties["uri"] == "jdbc:postgresql://h:5433/db"
    assert (properties["jdbc.user"], properties["jdbc.password"]) == ("u", "p")
    assert (properties["jdbc.connectTimeout"], properties["jdbc.socketTimeout"]) == ("5", "30")
    # In an address it is percent-encoded, and PyIceberg's client decodes it.
    properties = jdbc_properties("postgresql+psycopg2://a%40b:p%40s%2Fs%25@h/db")
    assert (properties["jdbc.user"], properties["jdbc.password"]) == ("a@b", "p@s/s%")
    uri = "postgresql+psycopg2://u:p@h/db?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem&application_name=anabranch"
    properties = jdbc_properties(uri)
    assert properties["jdbc.sslmode"] == "verify-full"
    assert properties["jdbc.sslrootcert"] == "/etc/ca.pem"
    assert properties["jdbc.ApplicationName"] == "anabranch"
    # Its own time-outs win, as for the other client.
    found = jdbc_properties("postgresql+psycopg2://h/db?connect_timeout=60")["jdbc.connectTimeout"]
    assert found == "60"
    found = r"catalog\.uri: expected only the parameters .*sslmode.*, found 'service'"
    with pytest.raises(ConfigurationError, match=found):
        jdbc_properties("postgresql+psycopg2://h/db?service=mine")


def environment(**catalog: Any) -> config.Environment:
    return config.Environment(
        kafka=config.Kafka(bootstrap_servers="127.0.0.1:1"),
        catalog=config.Catalog(name="lake", warehouse="s3://b/w", **catalog),
        s3=config.S3(region="eu-west-1"),
    )


def in_spark(given: config.Environment) -> dict[str, str]:
    prefix, settings = "spark.sql.catalog.lake.", session_settings(given)
    return {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}


def test_both_clients_of_a_rest_catalog_have_the_same_settings() -> None:
    properties = {"token": "t", "rest.sigv4-enabled": True}
    given = environment(type="rest", uri="https://c.example.com/api", properties=properties)
    python, spark = catalog_properties(given), in_spark(given)
    for properties in (python, spark):
        assert (properties["type"], properties["uri"]) == ("rest", "https://c.example.com/api")
        assert (properties["token"], properties["rest.sigv4-enabled"]) == ("t", "true")
        assert not [key for key in properties if key.startswith(("jdbc", "pool", "glue"))]
    assert spark["rest.client.socket-timeout-ms"] == "30000"


def test_pyicebergs_file_access_gets_the_certificates_to_trust() -> None:
    def properties(**s3: str) -> dict[str, str]:
        settings = {
            "kafka": {"bootstrap_servers": "127.0.0.1:9092"},
            "catalog": {"name": "lake", "type": "rest", "uri": "http://h", "warehouse": "s3://b/w"},
        }
        return catalog_properties(config.Environment.model_validate(settings | {"s3": s3}))

    assert "s3.ca" not in properties()
    assert properties(ca="/etc/ca.pem")["s3.ca"] == "/etc/ca.pem"


def test_a_rest_server_with_named_warehouses_gets_the_name() -> None:
    given = environment(type="rest", uri="http://c", properties={"warehouse": "games"})
    assert catalog_properties(given)["warehouse"] == in_spark(given)["warehouse"] == "games"
    assert given.catalog.warehouse == "s3://b/w"


def test_both_clients_of_glue_have_the_same_settings_and_no_address() -> None:
    given = environment(type="glue", properties={"glue.endpoint": "http://h:1"})
    python, spark = catalog_properties(given), in_spark(given)
    for properties in (python, spark):
        assert (properties["type"], properties["warehouse"]) == ("glue", "s3://b/w")
        assert properties["client.region"] == "eu-west-1"
        assert properties["glue.endpoint"] == "http://h:1"
        assert not [k for k in properties if k.startswith(("jdbc", "pool", "rest", "uri"))]


def test_a_sql_catalog_of_spark_is_a_jdbc_catalog_of_the_same_tables() -> None:
    properties = in_spark(environment(uri="postgresql+psycopg2://u:p@h/db"))
    assert (properties["type"], properties["jdbc.schema-version"]) == ("jdbc", "V1")
    assert properties["uri"] == "jdbc:postgresql://h:5432/db"


def test_possible_secrets_are_not_shown() -> None:
    secret = {"credential": "id:hunter2", "header.Authorization": "hunter2"}
    given = environment(type="rest", uri="http://c", properties=secret)
    postgres = environment(uri="postgresql+psycopg2://u:hunter2@h/db")
    assert "hunter2" not in f"{given!r} {given} {postgres!r} {postgres}"
    settings = session_settings(given) | session_settings(postgres)
    redacted = re.compile(settings["spark.redaction.regex"])
    bare = {key for key, value in settings.items() if "hunter2" in value}
    assert bare and all(redacted.search(key) for key in bare)


def test_a_rest_server_that_does_not_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_settings, "PATIENCE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        lake = Lake(environment(type="rest", uri=uri, properties={"token": "t"}))
        with pytest.raises(Transient, match="Read timed out"):
            lake.exists("games.events")


def test_postgresql_without_its_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    found = r"found no psycopg2; run `pip install 'anabranch\[postgres\]'`"
    with pytest.raises(ConfigurationError, match=found):
        catalog_properties(environment(uri="postgresql+psycopg2://u:p@h/db"))
