"""Four hours of a real lake in a folder, and what the layers and maintenance do to them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lakes import FIRST, StreamLake, new_lake
from people import job_of
from proofs import NOW

from anabranch import config, protocol
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.lifecycle.erasure import run
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import Accepted, Confirmed, accepted_properties

HOURS = [shift(FIRST, n) for n in range(4)]


def cut(hour: str) -> Cut:
    n = HOURS.index(hour)
    return Cut("t", {0: (10 * n, 10 * n + 10)})


def four_hours(folder: Path, s3: config.S3 | None = None) -> StreamLake:
    """Four sealed hours, with ten offsets of the speed layer each; in bucket `lake` of `s3`."""
    timeline = Timeline(FIRST, shift(HOURS[-1], 1), {0: 40}, sealed={h: cut(h) for h in HOURS})
    one = new_lake(folder, timeline=timeline, s3=s3)
    one.serve([(h, 0, o) for h in HOURS for o in range(*cut(h).ranges[0])], {0: 40})
    return one


def accept(lake: StreamLake, hour: str, rows: int, record: bool = True) -> None:
    """The batch layer publishes the next revision of an hour, with so many of its rows."""
    before = lake.state().accepted.get(hour)
    revision = before.revision + 1 if before is not None else 1
    staged = lake.stage([(hour, 0, cut(hour).ranges[0][0] + i) for i in range(rows)])
    state = lake.state()
    decided = protocol.ledger.decision(
        hour, "accepted", revision, cut(hour), NOW, new_id(), served=state.served_by(hour)
    )
    publish = lake.accept(
        staged, hour, Accepted(revision, cut(hour)), state,
        decisions=(replace(decided, served="batch"),),
        timeline=replace(state.timeline, sealed={h: c for h, c in state.timeline.sealed.items() if h != hour}),
    )  # fmt: skip
    if state.overrides.get(hour) == "speed":
        properties = accepted_properties(state, {hour: Accepted(revision, cut(hour))})
        changes = (replace(publish.changes[0], properties=properties), Change("main"))
        publish = replace(publish, changes=changes, decisions=(replace(decided, served="speed"),))
    lake.land(publish, state)
    if record:
        lake.ledger.record_waiting(lake.state())


@contextmanager
def lost_commits(folder: Path) -> Iterator[None]:
    """Commits within are lost, as after a restore of the catalog's backup."""
    shutil.copy(folder / "catalog.db", folder / "backup.db")
    yield
    shutil.copy(folder / "backup.db", folder / "catalog.db")


def erase(lake: StreamLake, *offsets: int) -> run.Erased:
    """Erase the records at some offsets, by their ids."""
    job = job_of(lake.environment, lake.lake, records=40)
    order = run.ErasureRequest("id", frozenset(f"0-{offset}" for offset in offsets), "case 4711")
    return run.erase(job, lake.publisher, order)


def confirm(lake: StreamLake) -> None:
    """The next publish drops what the ledger was read back to hold."""
    state = lake.state()
    known = lake.ledger.record_waiting(state)
    changes = tuple(Change(b) for b in ("speed", "batch", "main"))
    lake.change(*changes, confirmed=Confirmed(known), state=state)


def expire(lake: StreamLake) -> None:
    """All snapshots but the heads and the tagged ones."""
    table = lake.table()
    lake.lake.commit(table, Commit(new_id(), {}, (), expire=plan_expiry(table, None, NOW, keep=0)))
