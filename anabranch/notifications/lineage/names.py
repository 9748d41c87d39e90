"""Names of datasets by OpenLineage's naming conventions (https://openlineage.io/docs/spec/naming).
OpenLineage's integrations with Kafka and Spark use the same names for the same topic and table, so
their lineage connects to ours."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from anabranch.config import Catalog, Kafka


class Name(NamedTuple):
    """A dataset's identity."""

    namespace: str
    name: str


def topic_name(kafka: Kafka, topic: str) -> Name:
    """Return the topic's name; the first of several bootstrap servers names the cluster. Pure."""
    first = kafka.bootstrap_servers.split(",")[0].strip()
    return Name(f"kafka://{first.partition('://')[2] or first}", topic)


def table_name(location: str) -> Name:
    """Return the table's name: the location of its files, in any catalog. Pure."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Name("file", parts.path.rstrip("/"))
    return Name(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))


def catalog_name(catalog: Catalog, region: str, table: str) -> Name | None:
    """Return the table's name in its catalog; None if the conventions define none for its type.
    Pure."""
    if catalog.type == "rest":
        return Name(catalog.uri, table)
    account = catalog.properties.get("glue.id")
    if catalog.type == "glue" and account is not None:
        return Name(
            f"arn:aws:glue:{region}:{account.get_secret_value()}",
            f"table/{table.replace('.', '/')}",
        )
    return None


def catalog_address(catalog: Catalog) -> str | None:
    """Return the catalog's address without user, password and parameters. Pure."""
    if not catalog.uri:
        return None
    scheme, _, rest = catalog.uri.partition("://")
    # The password may contain characters that end the host part of a URL.
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
