"""Check the catalog: whether it answers, and whether a commit can take its lock."""

from __future__ import annotations

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.config import Catalog, Environment
from anabranch.iceberg import admin
from anabranch.iceberg.catalog_settings import with_timeouts
from anabranch.iceberg.lake import Lake
from anabranch.operations.doctor.finding import Finding, Issue, error

# Opening an SQL catalog that another process has locked takes twice this time: PyIceberg's failed
# lookup of its tables, and its attempt to create them. The doctor waits longer, so that it names
# the lock.
_LOCK_SECONDS = 2


def read(environment: Environment) -> None:
    """Raises ConfigurationError for a missing permission, Transient for a catalog that is
    unreachable or locked."""
    settings = environment.catalog
    impatient = settings.model_copy(update={"uri": with_timeouts(settings.uri, _LOCK_SECONDS)})
    lake = Lake(environment.model_copy(update={"catalog": impatient}))
    admin.try_to_write(lake)
    # No table has this name.
    lake.exists("anabranch.doctor")


def failed(catalog: Catalog, failure: AnabranchError) -> Finding:
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
