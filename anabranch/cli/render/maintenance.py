"""Texts of maintenance: its result, and the expiry of rows: expired hours, the storage that this
frees and when, and why hours are kept longer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from anabranch.cli.report import Table, Text
from anabranch.lifecycle.retention import LedgerExpired, Promise, RowsExpired
from anabranch.offsets.hours import spans_of
from anabranch.operations.reports.maintenance import COLUMNS, Maintenance, last_run_words


def maintained_text(
    stream: str, done: dict[str, Any], known: Maintenance | None, dry_run: bool
) -> Text:
    """Return what a run deleted, or would delete, and the state of the stream's maintenance if
    `known`."""
    would = "would be " if dry_run else ""
    hours = ", ".join(done["speed_hours"]) or "none"
    yield f"{stream}: speed rows {would}dropped of hours: {hours}"
    yield from _expiry(stream, "rows", done["rows"], dry_run)
    yield from _expiry(stream, "dead letters", done["letters"], dry_run)
    yield from _ledger_expiry(stream, done["ledger"], dry_run)
    for table, orphans in done["orphans"].items():
        yield (
            f"{stream}: {table}: {done['expired'][table]} snapshots {would}expired, "
            f"{orphans['files']} orphan files {would}deleted, {orphans['bytes']} bytes"
        )
    for folder, did in done["folders"].items():
        yield f"{stream}: {folder}: {did.gone.files} files {would}deleted, {did.gone.bytes} bytes"
    if known is not None:
        yield from maintenance_text(known)


def maintenance_text(view: Maintenance) -> Text:
    """Return the last run, and the size and pending work of each table."""
    yield f"last run: {last_run_words(view)}"
    rows = [
        [
            name,
            t.metadata_bytes,
            t.snapshots,
            t.expirable,
            t.tags,
            t.manifests,
            t.files,
            t.rows,
            size.files if (size := view.spared.get(name)) is not None else None,
        ]
        for name, t in view.tables.items()
    ]
    yield Table(COLUMNS, rows)
    for name, why in view.unread.items():
        yield f"could not read {name}: {why}"
    if view.speed_files:
        hour, files = max(view.speed_files.items(), key=lambda pair: pair[1])
        yield (
            f"files of the speed layer in main: {sum(view.speed_files.values())}, most in {hour}: "
            f"{files}"
        )
    if view.letters_wait_since is not None:
        yield f"dead letters pending since {view.letters_wait_since.isoformat(timespec='seconds')}"


def _expiry(stream: str, what: str, rows: RowsExpired, dry_run: bool) -> Text:
    """Return the expired hours, those that are kept longer, and what the expiry frees."""
    would = "would be " if dry_run else ""
    yield f"{stream}: {what} {would}expired of {len(rows.hours)} hours: {span_words(rows.hours)}"
    for reason, hours in groupby(rows.kept.items(), key=lambda item: item[1]):
        named = [hour for hour, _ in hours]
        yield f"{stream}: {what} kept beyond their time: {span_words(named)}: {reason}"
    if rows.promise is not None and rows.promise.stored.files:
        for line in promise_lines(rows.promise):
            yield f"{stream}: {what}: {line}"


def _ledger_expiry(stream: str, ledger: LedgerExpired, dry_run: bool) -> Text:
    """Return the expiry of the ledger's rows, if any expire."""
    if ledger.before is not None:
        would = "would leave" if dry_run else "left"
        size = f"{ledger.size.files} files, {ledger.size.bytes} bytes"
        yield f"{stream}: ledger: rows of hours before {ledger.before} {would}: {size}"


def promise_lines(promise: Promise) -> Iterator[str]:
    """Yield lines on the storage that expiry frees: when, and what still refers to it. Pure."""
    stored, leaving = promise.stored, promise.leaving
    yield (
        f"expiry frees {stored.files} files, {stored.bytes} bytes; {leaving.bytes} bytes are still "
        "on a branch"
    )
    for holder in promise.holders:
        until = (
            f"until {holder.until:%F %T} UTC" if holder.until is not None else "until it is dropped"
        )
        yield f"  {holder.name} has {holder.size.bytes} bytes of it {until}"
    if promise.gone_at is not None:
        yield f"the last byte is deleted by the first run after {promise.gone_at:%F %T} UTC"
    else:
        yield "no run deletes the last byte while a reference to it has no end"
    if promise.versions is None:
        yield "the bucket did not report whether it keeps versions of deleted objects"
    elif promise.versions:
        yield "the bucket keeps versions of deleted objects, as long as its lifecycle rules say"


def span_words(hours: Iterable[str]) -> str:
    """Return hours as spans such as `A..B`, or `none`. Pure."""
    return ", ".join(a if a == b else f"{a}..{b}" for a, b in spans_of(hours)) or "none"
