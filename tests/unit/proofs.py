"""An hour of a real lake, accepted as by the batch layer, and hands that spoil it."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lakes
from lakes import FIRST, StreamLake, decide, new_environment, new_lake, stage

from anabranch.common.json_values import from_json
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.manifests import files_of
from anabranch.iceberg.snapshots import Staged, heads
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.ledger_row import HourAccount, LedgerRow
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import Accepted
from batch_layer.plan import Rebuilt, plan_publish

HOUR, NEXT = FIRST, shift(FIRST, 1)
NOW = datetime(2026, 11, 21, 2, tzinfo=UTC)
# Of NEXT, per partition.
CUT = Cut("t", {0: (4, 10), 1: (0, 0)})
BEFORE = Cut("t", {0: (0, 4), 1: (0, 0)})


def event(p: int, o: int, hour: str = NEXT, **values: Any) -> dict[str, Any]:
    return lakes.event(p, o, hour, **values)


def stage_rows(one: StreamLake, rows: Iterable[dict[str, Any]]) -> Staged:
    return stage(one.lake, one.name, rows)


def job(one: StreamLake) -> Job:
    """A job on the lake, with a Kafka that no test may use."""
    environment = new_environment(one.folder)
    return Job(environment, one.stream, one.lake, KafkaAdapter(environment.kafka))


def new_proof(folder: Path, name: str = "events", **timeline: Any) -> StreamLake:
    """A lake in which HOUR and NEXT are sealed, and nothing is read."""
    given = {"sealed": {HOUR: BEFORE, NEXT: CUT}} | timeline
    return new_lake(folder, 2, Timeline(HOUR, shift(FIRST, 2), {0: 10, 1: 0}, **given), name=name)


def read(one: StreamLake, rows: Iterable[dict[str, Any]], offsets: dict[int, int]) -> None:
    """The speed layer publishes rows, and its position."""
    one.land(one.speed(stage_rows(one, rows), offsets))


def accept(
    one: StreamLake,
    hour: str,
    cut: Cut,
    rows: Iterable[dict[str, Any]],
    dead: Iterable[tuple[int, int]] = (),
    revision: int = 1,
    **values: Any,
) -> None:
    """The batch layer publishes an hour, its dead letters, and its row of the ledger."""
    rows = list(rows)
    one.land(one.accept(stage_rows(one, rows), hour, Accepted(revision, cut)))
    letters = [(hour, p, o) for p, o in dead]
    if letters:
        bury(one, letters)
    good = {"good": len(rows), "dead": len(letters), "duplicate": 0, "gap": 0, "gaps": {}}
    record(one, decide(hour, "accepted", revision, cut, NOW, served="batch", **(good | values)))


def bury(
    one: StreamLake,
    letters: Iterable[tuple[str, int, int]],
    branches: Iterable[str] = ("batch", "main"),
) -> None:
    """Dead letters, published as those of an accepted hour are."""
    staged = one.stage_dead(letters, "batch")
    table = one.lake.load(one.stream.dead_letters_table)
    changes = tuple(Change(b, staged.files) for b in branches)
    assert one.lake.commit(table, Commit(new_id(), heads(table), changes)) is Outcome.LANDED


def record(one: StreamLake, *rows: LedgerRow) -> None:
    one.ledger.record(rows)


def rebuild(
    one: StreamLake, hour: str, cut: Cut, revision: int, rows: list[dict[str, Any]], **values: Any
) -> None:
    """Rebuild an hour as the batch layer does: publish with all tags, then record in the ledger.
    `values` are further ones of its account, and its reason."""
    staged, state = stage_rows(one, rows), one.state()
    counts = {"good": len(rows), "dead": 0, "duplicate": 0, "gap": 0, "gaps": {}, "speed_rows": 0}
    account = from_json(HourAccount, counts | values)
    built = Rebuilt(hour, Accepted(revision, cut), staged, (), account, values.get("reason"))
    # The tag of a replaced revision ends a week after the publish.
    publish = plan_publish(state, [built], NOW if revision == 1 else datetime.now(UTC))
    one.land(publish, state)
    record(one, *publish.decisions)


def spoil(
    one: StreamLake,
    add: Iterable[dict[str, Any]] = (),
    remove_hour: str | None = None,
    branch: str = "main",
) -> None:
    """A wrong hand on one branch: rows put in, or an hour's files taken out."""
    state = one.state()
    rows = list(add)
    added = stage_rows(one, rows).files if rows else ()
    state = one.state()
    removed = files_of(state.table, branch, remove_hour) if remove_hour else ()
    one.change(Change(branch, added, removed), *_main(branch), state=state)


def _main(branch: str) -> tuple[Change, ...]:
    return () if branch == "main" else (Change("main"),)
