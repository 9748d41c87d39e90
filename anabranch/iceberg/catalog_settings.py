"""The properties with which PyIceberg and Spark use the same catalog. Both clients give up on a
lock or a dead connection within seconds; the caller retries and logs it.
"""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

from anabranch.common.errors import ConfigurationError, installed
from anabranch.config import Catalog, Environment

# The time that a client waits for a catalog that another process has locked.
PATIENCE_SECONDS = 10
# pgjdbc's names for libpq's parameters (https://jdbc.postgresql.org/documentation/use/).
_PGJDBC = {
    "application_name": "ApplicationName",
    "channel_binding": "channelBinding",
    "connect_timeout": "connectTimeout",
    "gssencmode": "gssEncMode",
    "options": "options",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "sslmode": "sslmode",
    "sslpassword": "sslpassword",
    "sslrootcert": "sslrootcert",
}
# Beginning of the properties that a namespace gets when `apply` creates it.
_OF_NAMESPACE = "namespace."
# Detection of dead connections, for which pgjdbc has `socketTimeout` and `tcpKeepAlive`.
_PSYCOPG2_ALONE = {
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
}


def catalog_properties(environment: Environment) -> dict[str, str]:
    """Return PyIceberg's properties for the catalog and S3; `catalog.properties` take precedence.
    Creates the folder of an SQLite file, and sets time-outs of psycopg2 and the REST client."""
    catalog, s3 = environment.catalog, environment.s3
    properties = {
        "type": catalog.type,
        "warehouse": catalog.warehouse,
        "s3.region": s3.region,
        "s3.connect-timeout": "3",
        "s3.request-timeout": "8",
    }
    if catalog.warehouse.startswith("s3://"):
        properties |= {"py-io-impl": "anabranch.iceberg.file_io.LakeFileIO"}
    if catalog.type == "sql":
        _prepare_database(catalog.uri)
        # A connection broken by a restart of the database is replaced before its use.
        properties |= {"uri": with_timeouts(catalog.uri), "pool_pre_ping": "true"}
    elif catalog.type == "rest":
        limit_rest_waits()
        properties |= {"uri": catalog.uri}
    else:
        properties |= {"client.region": s3.region}
    if s3.endpoint:
        properties |= {"s3.endpoint": s3.endpoint, "s3.force-virtual-addressing": "false"}
    if s3.ca:
        # PyIceberg has no such property: `LakeFileIO` passes it to PyArrow.
        properties |= {"s3.ca": s3.ca}
    if s3.access_key and s3.secret_key:
        properties |= {
            "s3.access-key-id": s3.access_key.get_secret_value(),
            "s3.secret-access-key": s3.secret_key.get_secret_value(),
        }
    return properties | given_properties(catalog)


def _prepare_database(uri: str) -> None:
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///").split("?")[0]).parent.mkdir(parents=True, exist_ok=True)
    if uri.startswith("postgresql+psycopg2:"):
        limit_psycopg2_waits()


def given_properties(catalog: Catalog) -> dict[str, str]:
    """Return `catalog.properties` for both clients, with secrets as plain text."""
    return {key: value.get_secret_value() for key, value in catalog.properties.items()}


def namespace_properties(catalog: Catalog) -> dict[str, str]:
    """Return the properties of a new namespace: the catalog's that begin with `namespace.`."""
    return {
        key.removeprefix(_OF_NAMESPACE): value
        for key, value in given_properties(catalog).items()
        if key.startswith(_OF_NAMESPACE)
    }


def spark_properties(catalog: Catalog, region: str) -> dict[str, str]:
    """Return the properties of Iceberg's Java client for the catalog. Raises ConfigurationError for
    an unsupported database or parameter."""
    if catalog.type == "sql":
        return {"type": "jdbc", "jdbc.schema-version": "V1", **jdbc_properties(catalog.uri)}
    if catalog.type == "rest":
        patience = {"connection": "5000", "socket": str(3000 * PATIENCE_SECONDS)}
        waits = {f"rest.client.{kind}-timeout-ms": limit for kind, limit in patience.items()}
        return {"type": "rest", "uri": catalog.uri, **waits}
    return {"type": "glue", "client.region": region}


def with_timeouts(uri: str, seconds: int = PATIENCE_SECONDS) -> str:
    """Return an SQLAlchemy URI with time-outs; the URI's own take precedence. Pure."""
    kind = uri.split(":", 1)[0].split("+")[0]
    wanted = {
        "sqlite": {"timeout": seconds},
        "postgresql": {
            "connect_timeout": 5,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 3000 * seconds,
        },
    }.get(kind, {})
    given = uri.partition("?")[2]
    named = {pair.partition("=")[0] for pair in given.split("&")}
    more = "&".join(f"{key}={value}" for key, value in wanted.items() if key not in named)
    return f"{uri}{'&' if given else '?'}{more}" if more else uri


def limit_psycopg2_waits() -> None:
    """Make psycopg2 close a connection whose server sends nothing for three times PATIENCE_SECONDS.
    psycopg2 has no such time-out, and a hanging server, or a proxy that drops answers, keeps the
    TCP connection alive. Applies to the whole process.
    """
    with installed("catalog.uri", "PostgreSQL's driver", "anabranch[postgres]"):
        import psycopg2
        from psycopg2 import extensions

    def wait(connection: Any) -> None:
        while (state := connection.poll()) != extensions.POLL_OK:
            socket = [connection.fileno()]
            wanted = (socket, []) if state == extensions.POLL_READ else ([], socket)
            if not any(select.select(*wanted, [], 3 * PATIENCE_SECONDS)):
                raise psycopg2.OperationalError(
                    f"the server has not answered for {3 * PATIENCE_SECONDS} s"
                )

    extensions.set_wait_callback(wait)


def limit_rest_waits() -> None:
    """Set time-outs for PyIceberg's REST catalog, which has none and sends a request when it is
    opened. Applies to the whole process."""
    from pyiceberg.catalog import rest
    from requests import Session

    class Patient(Session):
        def request(self, *args: Any, **kwargs: Any) -> Any:
            return super().request(*args, **({"timeout": (5, 3 * PATIENCE_SECONDS)} | kwargs))

    rest.Session = Patient  # type: ignore[attr-defined]


def keep_state_out_of_glue(catalog: Any) -> None:
    """Keep our changing table properties (state, turns) out of Glue's table parameters.

    PyIceberg copies table properties to these parameters and never removes one, and Glue limits a
    request's size. The metadata file has all properties, and readers of a table use only this file.
    """

    def strip(params: dict[str, Any], **_: object) -> dict[str, Any]:
        table = params["TableInput"]
        kept = {
            k: v for k, v in table.get("Parameters", {}).items() if not k.startswith(_NOT_FOR_GLUE)
        }
        return {**params, "TableInput": {**table, "Parameters": kept}}

    catalog.glue.meta.events.register("provide-client-params.glue.UpdateTable", strip)


_NOT_FOR_GLUE = ("anabranch.state.", "anabranch.turn")


def jdbc_properties(uri: str) -> dict[str, str]:
    """Return the properties of Iceberg's JDBC catalog for an SQLAlchemy URI, whose time-outs take
    precedence. Raises ConfigurationError for another database, or a parameter without equal."""
    from sqlalchemy.engine import make_url

    url = make_url(uri)
    kind = url.get_backend_name()
    if kind == "sqlite":
        return {
            "uri": f"jdbc:sqlite:{Path(url.database or '').resolve()}",
            "jdbc.busy_timeout": str(1000 * PATIENCE_SECONDS),
        }
    if kind != "postgresql":
        raise ConfigurationError(
            f"catalog.uri: expected sqlite:///… or postgresql+psycopg2://…, found {kind}://…"
        )
    if unknown := sorted(url.query.keys() - _PGJDBC.keys() - _PSYCOPG2_ALONE):
        raise ConfigurationError(
            f"catalog.uri: expected only the parameters {', '.join(sorted(_PGJDBC))}, found "
            f"{unknown[0]!r}, which Spark's client of PostgreSQL does not have"
        )
    properties = {
        "uri": f"jdbc:postgresql://{url.host}:{url.port or 5432}/{url.database or ''}",
        "jdbc.connectTimeout": "5",
        "jdbc.socketTimeout": str(3 * PATIENCE_SECONDS),
        "jdbc.tcpKeepAlive": "true",
    }
    properties |= {
        f"jdbc.{_PGJDBC[key]}": str(value) for key, value in url.query.items() if key in _PGJDBC
    }
    if url.username:
        properties |= {"jdbc.user": url.username, "jdbc.password": url.password or ""}
    return properties
