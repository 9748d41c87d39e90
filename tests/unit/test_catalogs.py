"""The catalog's address for both clients, with time-outs that let a job say that it waits."""

from __future__ import annotations

import pytest

from anabranch.catalogs import jdbc_properties, with_patience
from anabranch.errors import ConfigurationError


def test_an_sqlite_client_waits_for_a_lock_as_long_as_the_other() -> None:
    assert with_patience("sqlite:////a/catalog.db") == "sqlite:////a/catalog.db?timeout=10"
    assert jdbc_properties("sqlite:////a/catalog.db") == {
        "uri": "jdbc:sqlite:/a/catalog.db",
        "jdbc.busy_timeout": "10000",
    }


def test_a_postgresql_client_notices_a_dead_connection() -> None:
    uri = "postgresql+psycopg2://u:p@h:5433/db"
    assert with_patience(uri).startswith(f"{uri}?connect_timeout=5&keepalives_idle=10&")
    found = jdbc_properties(uri)
    assert found["uri"] == "jdbc:postgresql://h:5433/db"
    assert (found["jdbc.user"], found["jdbc.password"]) == ("u", "p")
    assert (found["jdbc.connectTimeout"], found["jdbc.socketTimeout"]) == ("5", "30")


def test_what_the_address_says_itself_wins() -> None:
    assert with_patience("sqlite:///c.db?timeout=1") == "sqlite:///c.db?timeout=1"
    assert "connect_timeout=60&keepalives_idle" in with_patience("postgresql+psycopg2://h/db?connect_timeout=60")


def test_other_catalogs_are_left_alone() -> None:
    assert with_patience("http://h:8181") == "http://h:8181"
    with pytest.raises(ConfigurationError, match="expected sqlite"):
        jdbc_properties("mysql://h/db")
