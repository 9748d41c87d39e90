"""Which secrets executors get over a connection that is not encrypted."""

import pytest

from anabranch.config import Environment
from anabranch.spark.settings import REDACTED, exposed_keys, session_settings


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
    ("key", "is_secret"),
    [
        ("s3.sse.key", True),
        ("s3.sse.md5", True),
        ("header.X-Api-Key", True),
        ("header.Cookie", True),
        ("header.X-Custom", True),
        ("header.X-Iceberg-Access-Delegation", False),
        ("rest.passphrase", True),
        ("oauth2.client.pem", True),
        ("credential", True),
        ("s3.access-key-id", True),
        ("fs.azure.account.key.x.dfs.core.windows.net", True),
        ("google.cloud.auth.service.account.private.key", True),
        ("executorEnv.API_KEY", True),
        ("fs.s3a.accessKey", True),
        ("s3.endpoint", False),
        ("s3.path-style-access", False),
        ("io-impl", False),
        ("table-default.write.parquet.keyless", False),
    ],
)
def test_names_of_secrets_of_catalogs_and_stores(key: str, is_secret: bool) -> None:
    assert (REDACTED.search(f"spark.sql.catalog.lake.{key}") is not None) is is_secret


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
