"""Check the catalog: whether it answers, its latency, and whether a commit can take its lock."""

from __future__ import annotations

import time

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.config import Catalog, Environment
from anabranch.iceberg import admin
from anabranch.iceberg.catalog_settings import with_timeouts
from anabranch.iceberg.lake import Lake
from anabranch.operations.doctor.finding import Finding, Issue, error, warning

# Seconds for one request: every publish sends a few, and other publishers wait meanwhile.
_SLOW = 0.5
# Opening an SQL catalog that another process has locked takes twice this time: PyIceberg's failed
# lookup of its tables, and its attempt to create them. The doctor waits longer, so that it names
# the lock.
_LOCK_SECONDS = 2


def read(environment: Environment) -> float:
    """Return the duration of one table lookup over an open connection, in seconds. Raises
    ConfigurationError for a missing permission, Transient for a catalog that is unreachable or
    locked."""
    settings = environment.catalog
    impatient = settings.model_copy(update={"uri": with_timeouts(settings.uri, _LOCK_SECONDS)})
    lake = Lake(environment.model_copy(update={"catalog": impatient}))
    admin.try_to_write(lake)
    began = time.monotonic()
    # No table has this name; the lookup measures latency only.
    lake.exists("anabranch.doctor")
    return time.monotonic() - began


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


def findings(catalog: Catalog, seconds: float) -> list[Finding]:
    if seconds <= _SLOW:
        return []
    expected = f"an answer within {_SLOW} s: every publish sends several requests"
    remedy = "catalog.uri in anabranch.yaml: a catalog in the region of the jobs"
    subject = f"{catalog.name} ({catalog.type})"
    return [warning(Issue.CATALOG_SLOW, subject, expected, f"{seconds:.1f} s", remedy)]
