"""Texts of commands that change something: hours, erasures, imports, deliveries, files,
maintenance."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.report import Text, table_of
from anabranch.lifecycle.retention import Promise, RowsExpired
from anabranch.offsets.hours import spans_of
from anabranch.offsets.position import ranges_to_keys, size, to_keys
from anabranch.operations.reports.maintenance import Maintenance, last_run_words
from anabranch.protocol.deliveries import Delivery

if TYPE_CHECKING:
    from anabranch.config import Stream
    from anabranch.lifecycle.erasure.rows import Found
    from anabranch.lifecycle.erasure.run import Erased
    from anabranch.lifecycle.importing.run import Imported, ImportPlan
    from anabranch.protocol.merge import Merged
    from anabranch.protocol.topic_change import Adopted
    from serving_layer.changes import HourChange
    from serving_layer.egress import Failed


def new_streams_text(new: Sequence[Stream], count: int) -> Text:
    """Return the streams of families that have no table yet. `count`: all streams of families."""
    if new:
        yield f"families: {len(new)} new of {count} streams"
    for stream in new:
        words = f"topic {stream.topic}: stream {stream.name}, table {stream.table}"
        yield f"family {stream.family}: {words}"


def adopted_text(stream: str, topic: str, adopted: Adopted | None) -> Text:
    if adopted is None:
        yield f"{stream}: nothing to adopt: the position belongs to topic {topic}"
        return
    former, position = adopted.former_id, adopted.position
    is_same = former == position.topic_id
    again = "the same topic" if is_same else f"in place of {former}"
    yield f"{stream}: adopted topic id {position.topic_id} ({again})"
    yield (
        f"{stream}: sealed {', '.join(adopted.sealed)} at the published position; all rows stay "
        "served"
    )
    for hour, part in adopted.lost.items():
        yield f"{stream}: hour {hour}: {size(part)} offsets were never read"
    if is_same:
        yield f"{stream}: records after the end of its log are lost"
    else:
        yield (
            f"{stream}: records of {former} after its position are not read; `anabranch adopt` "
            "continues there when the configuration names that topic again"
        )
    offsets = ", ".join(f"{p}: {o}" for p, o in to_keys(position.offsets).items())
    yield f"{stream}: continues with hour {adopted.timeline.open} from position {offsets}"


def adopted_view(stream: str, adopted: Adopted | None) -> dict[str, Any]:
    if adopted is None:
        return {"stream": stream, "adopted": False}
    return {
        "stream": stream,
        "adopted": True,
        "former_topic_id": adopted.former_id,
        "topic_id": adopted.position.topic_id,
        "sealed": list(adopted.sealed),
        "open_hour": adopted.timeline.open,
        "position": to_keys(adopted.position.offsets),
        "lost": {hour: ranges_to_keys(part) for hour, part in adopted.lost.items()},
    }


def merged_text(stream: str, merged: Merged) -> Text:
    if not merged.swaps:
        yield f"{stream}: nothing to merge"
    for s in merged.swaps:
        outcome = s.refused or f"served by {s.layer}: {len(s.add)} files in, {len(s.remove)} out"
        yield f"{stream}: {s.hour} {outcome}"
    for hour, layer in sorted(merged.state.overrides.items()):
        yield f"{stream}: {hour} is served by {layer} by choice (`anabranch override`)"


def merged_view(stream: str, merged: Merged, dry_run: bool) -> dict[str, Any]:
    swaps = [
        {
            "hour": s.hour,
            "served": s.layer,
            "added": len(s.add),
            "removed": len(s.remove),
            "reason": s.refused,
        }
        for s in merged.swaps
    ]
    return {
        "stream": stream,
        "dry_run": dry_run,
        "swaps": swaps,
        "overrides": merged.state.overrides,
    }


def written_text(folder: str, written: Sequence[Path]) -> Text:
    """Return the files of a starter folder, and the next steps."""
    there = "" if Path(folder).resolve() == Path.cwd() else f"cd {shlex.quote(folder)}, "
    conf = Path(folder) / "conf"
    for file in written:
        yield f"wrote {file}"
    yield (
        f"edit: {conf / 'streams/game_events.yaml'} is one topic, its table and schema: copy it "
        "for a topic of your own"
    )
    yield f"edit: {conf / 'anabranch.yaml'} has the addresses of Kafka, S3 and the catalog"
    yield f"next: {there}anabranch dev up, anabranch apply (README.md has every step)"


def change_words(change: HourChange) -> str:
    replaced = f" instead of {change.replaces}" if change.replaces is not None else ""
    erased = f"  erased by {', '.join(change.erasures)}" if change.erasures else ""
    left = len(change.removed) if change.removed is not None else "?"
    return (
        f"{change.hour}  revision {change.revision}{replaced}  {change.served}  {change.rows} "
        f"rows  +{len(change.added)} -{left} files{erased}  snapshot {change.snapshot}  "
        f"{change.token}"
    )


def delivery_words(one: Delivery | Failed) -> str:
    """Return a delivery, or the failure of a target, as one line."""
    if not isinstance(one, Delivery):
        return f"{one.target}  failed: {one.error}"
    files = f"  {one.files} files" if one.files else ""
    return (
        f"{one.target}  {one.hour}  revision {one.revision}  {one.served}  {one.rows} rows{files}"
    )


def found_text(stream: str, found: Found) -> Text:
    """Return what an erasure would remove."""
    yield (
        f"{stream}: would erase {found.rows} rows and {found.dead} dead letters of "
        f"{len(found.hours)} hours, and replace {found.files} files"
    )
    if found.held:
        yield (
            f"{stream}: {len(found.held)} of these hours are kept by operators, {found.held[0]} "
            f"to {found.held[-1]}: refused without --in-spite-of-hold TEXT"
        )


def erased_text(stream: str, done: Erased) -> Text:
    removed = done.removed
    yield (
        f"{stream}: erasure {done.erasure.id}: removed {removed.rows} rows and {removed.dead} "
        f"dead letters of {len(removed.hours)} hours"
    )
    rest = f"done on every branch; `anabranch erasures {stream}` shows the rest"
    yield f"{stream}: {done.left or rest}"
    if done.was_done:
        yield (
            f"{stream}: it is of records before {done.erasure.at:%F %T} UTC; --again erases those "
            "since"
        )


def planned_text(stream: str, plan: ImportPlan) -> Text:
    yield (
        f"{stream}: would import {plan.rows} rows of {plan.files} files into {len(plan.hours)} "
        "hours"
    )
    if plan.hours:
        empty = sum(not rows for rows in plan.hours.values())
        yield (
            f"{stream}: hours {min(plan.hours)} to {max(plan.hours)} would be final, {empty} of "
            "them without rows: they are never restated; --undo takes them back until delivered"
        )
    for line in _left_out(plan):
        yield f"{stream}: {line}"


def imported_text(stream: str, done: Imported, key: Sequence[str]) -> Text:
    """Return the result of an import. `key`: the stream's key, which no two rows have."""
    yield (
        f"{stream}: imported {done.good} of {done.rows} rows into {len(done.hours)} hours; left "
        f"out {done.duplicate} that repeat another by {', '.join(key) or 'place in Kafka'}, and "
        f"{done.erased} that were erased"
    )
    for line in _left_out(done.plan):
        yield f"{stream}: {line}"


def imported_view(stream: str, done: Imported) -> dict[str, Any]:
    counts = {name: getattr(done, name) for name in ("rows", "good", "duplicate", "erased")}
    return {"stream": stream, "imported": done.hours, **counts, **plan_view(done.plan)}


def plan_view(plan: ImportPlan) -> dict[str, Any]:
    return {
        "files": plan.files,
        "version": plan.version,
        "hours": dict(sorted(plan.hours.items())),
        "known": list(plan.known),
        "left_out": {"before": plan.before, "of_kafkas_hours": plan.after},
        "notes": list(plan.notes),
    }


def _left_out(plan: ImportPlan) -> Iterator[str]:
    yield from plan.notes
    if plan.known:
        yield (
            f"{len(plan.known)} hours with rows are imported already: {plan.known[0]} to "
            f"{plan.known[-1]}"
        )
    if plan.before:
        yield f"{plan.before} rows are of earlier hours, which are not imported"
    if plan.after:
        yield f"{plan.after} rows are of hours that have Kafka's records, and are not imported"


def maintained_text(
    stream: str, done: dict[str, Any], known: Maintenance | None, dry_run: bool
) -> Text:
    """Return what a run deleted, or would delete, and the stream's maintenance if `known`."""
    would = "would be " if dry_run else ""
    hours = ", ".join(done["speed_hours"]) or "none"
    yield f"{stream}: speed rows {would}dropped of hours: {hours}"
    yield from _expiry(stream, "rows", done["rows"], dry_run)
    yield from _expiry(stream, "dead letters", done["letters"], dry_run)
    if (ledger := done["ledger"]).before is not None:
        files = f"{ledger.size.files} files, {ledger.size.bytes} bytes"
        leave = "would leave" if dry_run else "left"
        yield f"{stream}: ledger: rows of hours before {ledger.before} {leave}: {files}"
    for table, orphans in done["orphans"].items():
        yield (
            f"{stream}: {table}: {done['expired'][table]} snapshots {would}expired, "
            f"{orphans['files']} orphan files {would}deleted, {orphans['bytes']} bytes"
        )
    left = done["temporary"]
    yield f"{stream}: temporary folders: {left.files} files {would}deleted, {left.bytes} bytes"
    if known is not None:
        yield from maintenance_text(known)


def maintenance_text(view: Maintenance) -> Text:
    """Return the last run, and the size and pending work of each table."""
    yield f"last run: {last_run_words(view)}"
    yield table_of(
        {
            "table": name,
            "metadata bytes": t.metadata_bytes,
            "snapshots": t.snapshots,
            "to expire": t.expirable,
            "tags": t.tags,
            "manifests": t.manifests,
            "files": t.files,
            "rows": t.rows,
            "unreferenced": spared.files if (spared := view.spared.get(name)) is not None else None,
        }
        for name, t in view.tables.items()
    )
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
