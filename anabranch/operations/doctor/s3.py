"""Check S3: the permissions of the keys (by using them), and bucket settings that affect the
table's files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from typing import TypeVar

from pyiceberg.table import Table

from anabranch.common.errors import (
    AnabranchError,
    ConfigurationError,
    NotOffered,
    Terminal,
    Transient,
    Unexplained,
)
from anabranch.common.remote_errors import is_untrusted_s3
from anabranch.config import Environment, Stream
from anabranch.iceberg.clock import MAX_CLOCK_SKEW, is_apart
from anabranch.iceberg.file_io import store_of
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.s3 import LifecycleRule, bucket_and_key, open_store
from anabranch.operations.finding import Finding, Issue, dev_up, error, info, warning

T = TypeVar("T")

_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_BODY = b"anabranch doctor\n"


@dataclass(frozen=True)
class StoreFacts:
    """Facts about the bucket. `denied`: the first refused operation (writing, listing, reading or
    deleting an object) and its error. `deletes`: the store lists and deletes objects. `unreadable`:
    why a bucket setting could not be read, with its check. `awaits_table`: a REST catalog may vend
    keys, or accept files, for its tables only."""

    has_bucket: bool
    store_time: datetime
    now: datetime
    denied: tuple[str, str] | None = None
    deletes: bool = True
    versioned: bool = False
    rules: tuple[LifecycleRule, ...] = ()
    lock: str | None = None
    unreadable: tuple[tuple[Issue, str], ...] = ()
    awaits_table: bool = False


@dataclass(frozen=True)
class Warehouse:
    """The warehouse's location. `prefix` ends with a slash unless it is the whole bucket."""

    bucket: str
    prefix: str


def place(environment: Environment) -> Warehouse | None:
    """Return the warehouse's location; None if it is not in S3. Pure."""
    found = bucket_and_key(environment.catalog.warehouse)
    if found is None:
        return None
    prefix = found[1].strip("/")
    return Warehouse(found[0], f"{prefix}/" if prefix else "")


def table_of_rest(lake: Lake, streams: Sequence[Stream]) -> Table | None:
    """Return a table of the streams in a REST catalog, whose keys and storage may be for files of
    tables only; None if there is none."""
    if lake.environment.catalog.type != "rest":
        return None
    with suppress(AnabranchError):  # a finding of the catalog's own reader
        return next(filter(None, (lake.find(stream.table) for stream in streams)), None)
    return None


def read(
    environment: Environment,
    where: Warehouse,
    answered: Callable[[], None],
    find_table: Callable[[], Table | None] = lambda: None,
) -> StoreFacts:
    """Write, list, read and delete one small object under the warehouse, or as a file of the table
    that `find_table` returns, and read the bucket's settings; call `answered` after each request.
    Raises ConfigurationError (wrong keys, or no permission to read the bucket), Transient."""
    is_rest, now = environment.catalog.type == "rest", datetime.now(UTC)
    # The policies of deploy/s3 allow jobs to delete objects below a folder `metadata` only.
    key = f"{where.prefix}.anabranch-doctor/metadata/{uuid.uuid4().hex}"
    if (table := find_table()) is not None:
        store, place = store_of(table.io), bucket_and_key(table.location().rstrip("/"))
        assert place is not None
        has_bucket, where = True, Warehouse(place[0], f"{place[1]}/")
        # Orphan removal knows this name.
        key = f"{where.prefix}metadata/{uuid.uuid4().hex}.avro"
    else:
        store = open_store(environment.s3)
        try:
            has_bucket = store.has_bucket(where.bucket)
        except ConfigurationError:
            if not is_rest or environment.s3.access_key is not None:
                raise
            return StoreFacts(True, now, now, awaits_table=True)
    answered()
    if not has_bucket:
        now = datetime.now(UTC)
        return StoreFacts(False, now, now)
    store_time, now = store.clock(where.bucket), datetime.now(UTC)
    answered()

    def listed() -> None:
        if [k for k, _, _ in store.list_objects(where.bucket, key)] != [key]:
            raise Terminal("expected the object just written in the listing, found none")

    def read_back() -> None:
        if store.get(where.bucket, key) != _BODY:
            raise Terminal("expected the bytes just written, found others")

    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("s3:PutObject", lambda: store.put(where.bucket, key, _BODY, "text/plain")),
        ("s3:ListBucket", listed),
        ("s3:GetObject", read_back),
        ("s3:DeleteObject", lambda: store.delete_objects(where.bucket, [key])),
    )
    denied, deletes = None, True
    for right, step in steps:
        try:
            step()
        except NotOffered:
            deletes = False
        except AnabranchError as refused:
            if _is_unreachable(refused):
                raise
            denied = denied or (right, str(refused))
            if right == "s3:PutObject":
                if is_rest and table is None:
                    return StoreFacts(True, now, now, awaits_table=True)
                break
        finally:
            answered()
    unreadable: list[tuple[Issue, str]] = []

    def setting(check: Issue, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except AnabranchError as refused:
            # A server that does not implement a setting does not apply it either.
            if "NotImplemented" not in str(refused):
                unreadable.append((check, str(refused)))
            return None
        finally:
            answered()

    return StoreFacts(
        has_bucket=True,
        store_time=store_time,
        now=now,
        denied=denied,
        deletes=deletes,
        versioned=setting(Issue.VERSIONING, lambda: store.versioning(where.bucket)) == "Enabled",
        rules=setting(Issue.LIFECYCLE, lambda: store.lifecycle(where.bucket)) or (),
        lock=setting(Issue.OBJECT_LOCK, lambda: store.lock(where.bucket)),
        unreadable=tuple(unreadable),
    )


def _is_unreachable(failure: AnabranchError) -> bool:
    """Return whether the store did not answer. An unclassified error, or a denial, is an answer."""
    is_refusal = isinstance(failure, Unexplained) or "AccessDenied" in str(failure)
    return isinstance(failure, Transient) and not is_refusal


def failed(environment: Environment, where: Warehouse, failure: AnabranchError) -> Finding:
    subject = f"s3://{where.bucket}/{where.prefix}"
    if is_untrusted_s3(str(failure)):
        remedy = "s3.ca in anabranch.yaml: a file with the certificate of the server's authority"
        return error(
            Issue.S3_AWAY,
            subject,
            "a certificate of the object store that is trusted",
            str(failure),
            remedy,
        )
    if isinstance(failure, ConfigurationError):
        remedy = (
            "s3.access_key and s3.secret_key in anabranch.yaml, and a policy such as "
            "deploy/s3/jobs.json"
        )
        return error(
            Issue.S3_RIGHTS, subject, "permission to read the bucket", str(failure), remedy
        )
    address = environment.s3.endpoint or ""
    is_here = address.startswith(("http://127.0.0.1:", "http://localhost:"))
    remedy = (
        dev_up("s3.endpoint")
        if is_here
        else "s3.endpoint and s3.region in anabranch.yaml, and the network to them"
    )
    return error(Issue.S3_AWAY, subject, "an answer from the object store", str(failure), remedy)


def findings(where: Warehouse, streams: tuple[str, ...], facts: StoreFacts) -> Iterator[Finding]:
    subject = f"s3://{where.bucket}/{where.prefix}"
    if not facts.has_bucket:
        apply = f"anabranch apply {streams[0]}"
        yield warning(Issue.BUCKET_MISSING, f"s3://{where.bucket}", "a bucket", "none", apply)
        return
    if facts.awaits_table:
        found = "none yet: the catalog may allow them for its tables only"
        apply = f"anabranch apply {streams[0]}"
        yield info(Issue.NOT_EXAMINED, subject, "files in S3", found, apply)
        return
    if not facts.deletes:
        yield warning(
            Issue.S3_RIGHTS,
            subject,
            "a store that lists and deletes objects",
            "none: its own service has to remove unreferenced files",
            "nothing, if it does; `erase`, `drop` and `apply --register` are refused",
        )
    if facts.denied is not None and facts.lock is None:
        remedy = f"allow {facts.denied[0]} for {subject}*, as deploy/s3/jobs.json does"
        yield error(
            Issue.S3_RIGHTS, subject, f"permission for {facts.denied[0]}", facts.denied[1], remedy
        )
    if is_apart(facts.store_time, facts.now):
        apart = f"{abs(facts.store_time - facts.now).total_seconds():.0f} s"
        expected = f"this machine's clock and S3's within {MAX_CLOCK_SKEW.total_seconds():.0f} s"
        yield error(Issue.CLOCK, "this machine", expected, apart, "sudo timedatectl set-ntp true")
    yield from [one for rule in facts.rules if (one := _check_rule(where, rule)) is not None]
    if facts.versioned and not any(r.clears_versions and applies_to(where, r) for r in facts.rules):
        expected = (
            "a rule that removes noncurrent versions: without it, `anabranch maintain` frees no "
            "space"
        )
        remedy = (
            "a lifecycle rule of the bucket with NoncurrentVersionExpiration: {NoncurrentDays: 7}"
        )
        yield warning(
            Issue.VERSIONING, where.bucket, expected, "versioning without such a rule", remedy
        )
    if facts.lock is not None:
        expected = "no default retention: `anabranch maintain` cannot delete locked objects"
        lock = """--object-lock-configuration '{"ObjectLockEnabled": "Enabled"}'"""
        remedy = f"aws s3api put-object-lock-configuration --bucket {quote(where.bucket)} {lock}"
        # With object lock, S3 also requires a checksum for each object, which not every writer
        # sends.
        make_finding = warning if facts.denied is None else error
        found = facts.lock if facts.denied is None else f"{facts.lock}; {facts.denied[1]}"
        yield make_finding(Issue.OBJECT_LOCK, where.bucket, expected, found, remedy)
    # A setting that the server does not support is harmless; one that may not be read might apply.
    for check, why in facts.unreadable:
        yield info(
            check,
            where.bucket,
            "permission to read this setting of the bucket",
            f"it cannot be read: {why}",
            "nothing, if you know the setting",
        )


def applies_to(where: Warehouse, rule: LifecycleRule) -> bool:
    """Return whether a rule applies to files of the warehouse. Pure."""
    return rule.prefix.startswith(where.prefix) or where.prefix.startswith(rule.prefix)


def _check_rule(where: Warehouse, rule: LifecycleRule) -> Finding | None:
    does = (
        f"deletes after {rule.deletes_after}"
        if rule.deletes_after is not None
        else f"moves to {rule.moves_to}"
        if rule.moves_to in _ARCHIVES
        else None
    )
    if does is None or not applies_to(where, rule):
        return None
    expected = (
        "no rule that deletes or archives files of the warehouse: the table refers to them "
        "permanently"
    )
    make_finding = warning if rule.is_narrowed else error
    found = f"rule {rule.name or 'without an id'} {does}"
    remedy = (
        f"a prefix that excludes {where.prefix or 'the warehouse'} in that rule, or its Status: "
        "Disabled"
    )
    return make_finding(Issue.LIFECYCLE, where.bucket, expected, found, remedy)
