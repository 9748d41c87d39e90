"""Which secrets executors get over a connection that is not encrypted."""

import pytest

from anabranch.config import Environment
from anabranch.spark.settings import REDACTED, exposed_keys, session_settings


def settings(**conf: str) -> dict[str, str]:
    uri = "postgresql+psycopg2://u:p@h/db"
    environment = {
        "kafka": {"bootstrap_servers": "127.0.0.1:9092"}, "spark": {"conf": conf},
        "catalog": {"name": "lake", "uri": uri, "warehouse": "s3://b/w"},
        "s3": {"access_key": "known", "secret_key": "hidden"},
    }  # fmt: skip
    return session_settings(Environment.model_validate(environment))


@pytest.mark.parametrize(
    "master", ["spark://host:7077", "yarn", "k8s://https://host:6443", "local-cluster[2,1,1024]"]
)
def test_secrets_of_the_catalog_reach_executors_of_a_cluster_in_clear(master: str) -> None:
    names = ("jdbc.password", "s3.access-key-id", "s3.secret-access-key")
    assert exposed_keys(master, settings()) == tuple(f"spark.sql.catalog.lake.{n}" for n in names)


SECRET = [
    "s3.sse.key", "s3.sse.md5", "header.X-Api-Key", "header.Cookie", "header.X-Custom",
    "rest.passphrase", "oauth2.client.pem", "credential", "s3.access-key-id",
    "fs.azure.account.key.x.dfs.core.windows.net", "google.cloud.auth.service.account.private.key",
    "executorEnv.API_KEY", "fs.s3a.accessKey",
]  # fmt: skip
OPEN = [
    "header.X-Iceberg-Access-Delegation", "s3.endpoint", "s3.path-style-access", "io-impl",
    "table-default.write.parquet.keyless",
]  # fmt: skip


def test_names_of_secrets_of_catalogs_and_stores() -> None:
    found = [one for one in (*SECRET, *OPEN) if REDACTED.search(f"spark.sql.catalog.lake.{one}")]
    assert found == SECRET


def test_each_encryption_of_spark_covers_them() -> None:
    for key in ("network.crypto.enabled", "ssl.rpc.enabled", "authenticate.enableSaslEncryption"):
        assert exposed_keys("yarn", settings(**{f"spark.{key}": "true"})) == ()
        assert exposed_keys("yarn", settings(**{f"spark.{key}": "false"})) != ()
    # Authentication alone encrypts nothing.
    assert exposed_keys("yarn", settings(**{"spark.authenticate": "true"})) != ()


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]"])
def test_nothing_leaves_a_local_master(master: str) -> None:
    assert exposed_keys(master, settings()) == ()
