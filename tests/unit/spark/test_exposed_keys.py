"""Which secrets executors get over a connection that is not encrypted."""

from __future__ import annotations

import pytest

from anabranch.config import Environment
from anabranch.spark.settings import exposed_keys, session_settings


def settings(**conf: str) -> dict[str, str]:
    return session_settings(
        Environment.model_validate(
            {
                "kafka": {"bootstrap_servers": "127.0.0.1:9092"},
                "catalog": {
                    "name": "lake",
                    "uri": "postgresql+psycopg2://u:p@h/db",
                    "warehouse": "s3://b/w",
                },
                "s3": {"access_key": "known", "secret_key": "hidden"},
                "spark": {"conf": conf},
            }
        )
    )


@pytest.mark.parametrize(
    "master", ["spark://host:7077", "yarn", "k8s://https://host:6443", "local-cluster[2,1,1024]"]
)
def test_secrets_of_the_catalog_reach_executors_of_a_cluster_in_clear(master: str) -> None:
    assert exposed_keys(master, settings()) == (
        "spark.sql.catalog.lake.jdbc.password",
        "spark.sql.catalog.lake.s3.access-key-id",
        "spark.sql.catalog.lake.s3.secret-access-key",
    )


@pytest.mark.parametrize(
    "key",
    [
        "spark.network.crypto.enabled",
        "spark.ssl.rpc.enabled",
        "spark.authenticate.enableSaslEncryption",
    ],
)
def test_each_encryption_of_spark_covers_them(key: str) -> None:
    assert exposed_keys("yarn", settings(**{key: "true"})) == ()
    assert exposed_keys("yarn", settings(**{key: "false"})) != ()


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]"])
def test_nothing_leaves_a_local_master(master: str) -> None:
    assert exposed_keys(master, settings()) == ()


def test_authentication_alone_encrypts_nothing() -> None:
    assert exposed_keys("yarn", settings(**{"spark.authenticate": "true"})) != ()
