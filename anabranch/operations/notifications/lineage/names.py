"""What OpenLineage calls our datasets, by its naming conventions (https://openlineage.io/docs/spec/naming): as its own
integrations with Kafka and with Spark call the same topic and the same table, so that their lineage meets ours."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from anabranch.config import Catalog, Kafka


class Name(NamedTuple):
    """A dataset's identity."""

    namespace: str
    name: str


def topic_name(kafka: Kafka, topic: str) -> Name:
    """Of several bootstrap servers the first gives the cluster its name. Pure."""
    first = kafka.bootstrap_servers.split(",")[0].strip()
    return Name(f"kafka://{first.partition('://')[2] or first}", topic)


def table_name(location: str) -> Name:
    """A table's name is the location of its files, in any catalog. Pure."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Name("file", parts.path.rstrip("/"))
    return Name(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))


def catalog_name(catalog: Catalog, region: str, table: str) -> Name | None:
    """The table's name in its catalog, of those catalogs that the conventions have a name for. Pure."""
    if catalog.type == "rest":
        return Name(catalog.uri, table)
    account = catalog.properties.get("glue.id")
    if catalog.type == "glue" and account is not None:
        return Name(f"arn:aws:glue:{region}:{account.get_secret_value()}", f"table/{table.replace('.', '/')}")
    return None


def catalog_address(catalog: Catalog) -> str | None:
    """Where the catalog is, without user, password and parameters. Pure."""
    if not catalog.uri:
        return None
    scheme, _, rest = catalog.uri.partition("://")
    # The password may have characters that end the host of an address.
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
