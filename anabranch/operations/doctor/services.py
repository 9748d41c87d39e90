"""Check the catalog: whether it answers, and whether a commit can take its lock; and the schema
registry of a stream whose format needs one."""

from __future__ import annotations

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.config import Catalog, Environment, Stream
from anabranch.iceberg import admin
from anabranch.iceberg.catalog_settings import with_timeouts
from anabranch.iceberg.lake import Lake
from anabranch.kafka.schema_registry import open_registry
from anabranch.operations.finding import Finding, Issue, error, warning

# Opening an SQL catalog that another process has locked takes twice this time: PyIceberg's failed
# lookup of its tables, and its attempt to create them. The doctor waits longer, so that it names
# the lock.
_LOCK_SECONDS = 2


def read_catalog(environment: Environment) -> None:
    """Raises ConfigurationError for a missing permission, Transient for a catalog that is
    unreachable or locked."""
    settings = environment.catalog
    impatient = settings.model_copy(update={"uri": with_timeouts(settings.uri, _LOCK_SECONDS)})
    lake = Lake(environment.model_copy(update={"catalog": impatient}))
    admin.try_to_write(lake)
    # No table has this name.
    lake.exists("anabranch.doctor")


def catalog_failed(catalog: Catalog, failure: AnabranchError) -> Finding:
    subject = f"{catalog.name} ({catalog.type})"
    if "database is locked" in str(failure):
        expected = "the write lock within seconds"
        remedy = (
            "end the process that locks the file (fuser FILE lists it), or use PostgreSQL for "
            "several machines"
        )
        return error(Issue.CATALOG_LOCKED, subject, expected, str(failure), remedy)
    if isinstance(failure, ConfigurationError):
        remedy = (
            "catalog.uri or catalog.properties in anabranch.yaml: user, password, and the user's "
            "permissions"
        )
        return error(
            Issue.CATALOG_RIGHTS, subject, "permission to read and to write", str(failure), remedy
        )
    remedy = "catalog.uri in anabranch.yaml, and the catalog's server"
    return error(Issue.CATALOG_AWAY, subject, "an answer", str(failure), remedy)


def read_registry(environment: Environment, stream: Stream) -> bool:
    """Return whether the registry has the stream's subject; True for a stream without a subject if
    the registry answers. Raises ConfigurationError when the server refuses or is not a registry,
    Transient when it is unreachable."""
    registry = open_registry(environment, stream)
    if stream.format.subject is not None or stream.subject_schema is not None:
        return registry.has_subject(stream.subject)
    # Any answer about an id shows that the registry is reachable.
    registry.schema(1)
    return True


def registry_failed(stream: Stream, failure: AnabranchError) -> Finding:
    if isinstance(failure, ConfigurationError):
        remedy = "registry.url and the keys beside it in anabranch.yaml"
        return error(
            Issue.REGISTRY_RIGHTS, stream.name, "permission to read schemas", str(failure), remedy
        )
    remedy = "registry.url in anabranch.yaml, and the network to it"
    return error(
        Issue.REGISTRY_AWAY, stream.name, "an answer from the schema registry", str(failure), remedy
    )


def subject_findings(stream: Stream, has_subject: bool) -> list[Finding]:
    if has_subject:
        return []
    remedy = f"format.subject in {stream.name}.yaml, or the first schema registered by a producer"
    return [
        warning(Issue.SUBJECT_MISSING, stream.name, f"subject {stream.subject}", "none", remedy)
    ]
