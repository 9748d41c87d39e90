"""The settings with which a Spark session reaches the lake; and the Python packages that executors
need in the driver's versions, with the archive that contains them. `anabranch pack` writes it
(`speed_layer.pack`)."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tarfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from anabranch.config import Environment
from anabranch.iceberg.catalog_settings import given_properties, spark_properties

REDACTED = re.compile(
    "(?i)secret|password|passphrase|token|credential|authorization|cookie|jaas"
    "|access[._-]?key|(?<![a-z])key(?![a-z])|(?<![a-z])(pem|md5)(?![a-z])"
    "|header\\.(?!x-iceberg-)"
)
"""The keys whose values Spark redacts (`spark.redaction.regex`): Spark's default words, and the
names of keys and headers of catalogs and object stores. Python's and Java's syntax."""

EXECUTOR_JAVA = "spark.executor.extraJavaOptions"


def runs_here(master: str | None) -> bool:
    """Return whether tasks run on this machine, with its Python; others lack our code."""
    return (
        master is not None and master.startswith("local") and not master.startswith("local-cluster")
    )


_ENCRYPTION_KEYS = (
    "spark.network.crypto.enabled",
    "spark.ssl.rpc.enabled",
    "spark.authenticate.enableSaslEncryption",
)


def exposed_keys(master: str, conf: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of catalog secrets, S3's included, that Spark sends to executors over
    connections that its settings do not encrypt. Pure.

    Spark sends all settings to each executor, and `spark.sql` settings with each task, whatever
    code runs there.
    """
    if runs_here(master) or any(conf.get(key, "").lower() == "true" for key in _ENCRYPTION_KEYS):
        return ()
    return tuple(
        sorted(key for key in conf if key.startswith("spark.sql.catalog.") and REDACTED.search(key))
    )


def session_settings(environment: Environment) -> dict[str, str]:
    """Return Spark's configuration: catalog, S3, UTC; `spark.conf` takes precedence. The catalog's
    cache is off: it would hide other processes' commits."""
    catalog, s3 = environment.catalog, environment.s3
    prefix = f"spark.sql.catalog.{catalog.name}"
    settings = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        f"{prefix}.warehouse": catalog.warehouse,
        f"{prefix}.cache-enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.streaming.numRecentProgressUpdates": "10",
        "spark.sql.iceberg.handle-timestamp-without-timezone": "true",
        # A micro-batch must be complete or absent: a failed query is restarted from the table's
        # position.
        "spark.streaming.stopGracefullyOnShutdown": "false",
        "spark.redaction.regex": REDACTED.pattern,
        # Some S3 servers other than AWS do not support the newer checksums.
        "spark.driverEnv.AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "spark.executorEnv.AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    settings |= {
        f"{prefix}.{key}": value for key, value in spark_properties(catalog, s3.region).items()
    }
    if catalog.type == "rest":
        # As PyIceberg asks: keys for the files of a table, if the catalog vends them.
        settings[f"{prefix}.header.X-Iceberg-Access-Delegation"] = "vended-credentials"
    if catalog.warehouse.startswith("s3://"):
        settings |= {
            f"{prefix}.io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            f"{prefix}.client.region": s3.region,
            # The client retries an unanswered request for seconds; the job retries the operation.
            f"{prefix}.http-client.apache.connection-timeout-ms": "3000",
            f"{prefix}.http-client.apache.socket-timeout-ms": "10000",
            f"{prefix}.s3.retry.num-retries": "3",
            f"{prefix}.s3.retry.min-wait-ms": "100",
            f"{prefix}.s3.retry.max-wait-ms": "2000",
        }
        if s3.endpoint:
            settings |= {
                f"{prefix}.s3.endpoint": s3.endpoint,
                f"{prefix}.s3.path-style-access": "true",
            }
        if s3.access_key and s3.secret_key:
            settings |= {
                f"{prefix}.s3.access-key-id": s3.access_key.get_secret_value(),
                f"{prefix}.s3.secret-access-key": s3.secret_key.get_secret_value(),
            }
    settings |= {f"{prefix}.{key}": value for key, value in given_properties(catalog).items()}
    settings |= environment.spark.conf
    if ours := kafka_properties(environment):
        options = [f'-D{key}="{value}"' for key, value in ours.items()]
        configured = settings.get(EXECUTOR_JAVA, "")
        settings[EXECUTOR_JAVA] = " ".join([*options, configured]).strip()
    return settings


def kafka_properties(environment: Environment) -> dict[str, str]:
    """Return the system properties of Java's Kafka client, on the driver and on executors."""
    security = environment.kafka.security
    return security.system_properties() if security is not None else {}


ARCHIVE = "anabranch"
"""The archive's folder on executors."""
VERSIONS = "versions.json"
"""The archive's first file: the versions of its contents."""
CODE = ("anabranch", "speed_layer")
"""Our packages that Python workers import."""

_PACKAGES = ("duckdb", "msgspec", "numpy", "protobuf", "pyarrow", "pyiceberg")


@cache
def installed() -> dict[str, str]:
    """Return the versions of Python, of the packages, and a digest of our code."""
    versions = {name: version(name) for name in _PACKAGES}
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **versions,
        "anabranch": _code_digest(),
    }


def _code_digest() -> str:
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in CODE:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Return a sentence for the first part of `expected` that `found` lacks or has in another
    version; None if there is none. Pure."""
    for part, wanted in expected.items():
        if found.get(part) != wanted:
            return f"expected {part} {wanted}, found {found.get(part, 'none')}"
    return None


def packed_archive(conf: Mapping[str, str]) -> Path | None:
    """Return our archive of `spark.archives`; None unless it is a file of this machine."""
    for entry in conf.get("spark.archives", "").split(","):
        place, _, folder = entry.strip().partition("#")
        file = Path(place.removeprefix("file://"))
        if folder == ARCHIVE and file.is_file():
            return file
    return None


def packed_versions(file: Path) -> dict[str, str]:
    """Return an archive's versions; empty for another's. Raises OSError, tarfile.TarError."""
    with tarfile.open(file) as archive:
        first = archive.next()
        content = (
            archive.extractfile(first) if first is not None and first.name == VERSIONS else None
        )
        return dict(json.load(content)) if content is not None else {}
