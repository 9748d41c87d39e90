"""Maintenance beside both layers, each killed at its steps, and main damaged and swapped back: exact at
the end, and no file is ever gone that a branch, a tag or any remembered snapshot names.

Between two rounds all files are made days old: what the dead left is deleted beside new writers.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from commands import KILLED, Command, run, run_into, started
from pyiceberg.table import Table
from steadiness import shared_folder
from test_fail_points import damage, is_good
from world import Make, World, event, past_hour, spread

from anabranch.common.fail_points import FAIL_AT, Step
from anabranch.iceberg.files import list_files, references, same_file
from anabranch.iceberg.snapshots import BRANCHES, UNNAMED
from anabranch.offsets.hours import start_of
from anabranch.protocol.measured import read_runs

DAYS = 3 * 86_400


@dataclass(frozen=True)
class Round:
    """The steps at which the processes die; whether an hour is restated, `main` damaged."""

    speed: tuple[Step, int]
    batch: tuple[Step, int]
    maintain: Step
    restate: bool = False
    damage: bool = False


ROUNDS = [
    Round((Step.COMMIT_PREPARED, 3), (Step.BATCH_STAGED, 1), Step.MAINTAIN_DROPPED),
    Round((Step.SPEED_STAGED, 3), (Step.COMMIT_LANDED, 3), Step.MAINTAIN_LISTED, damage=True),
    Round(
        (Step.SPEED_PUBLISHED, 2), (Step.BATCH_PUBLISHED, 1), Step.MAINTAIN_DELETED, restate=True,
        damage=True,
    ),
]  # fmt: skip


def send_past(one: World, hours: list[str]) -> None:
    for hour in hours:
        end = start_of(hour).replace(minute=59, second=59)
        one.send([*spread(hour, 60, hour), (0, end, b"{broken " + hour.encode())])


def send_live(one: World, prefix: str) -> None:
    now = datetime.now(UTC)
    good = [(i % 2, now, event(f"{prefix}-{i}", now)) for i in range(8)]
    one.send([*good, (1, now, b"{broken " + prefix.encode())])


def tables(one: World) -> list[str]:
    stream = one.job.stream
    return [stream.table, stream.dead_letters_table, *stream.plain_tables]


def named_files(table: Table) -> Iterator[str]:
    """The files that any remembered snapshot names, as engines and maintenance read it."""
    for snapshot in table.snapshots():
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            yield manifest.manifest_path
            yield from (e.data_file.file_path for e in manifest.fetch_manifest_entry(table.io))
    yield from references(table)


def lost_files(one: World) -> set[str]:
    """Return the files that a table names and storage does not hold."""
    lost = set()
    for name in tables(one):
        table = one.lake.load(name)
        stored = {same_file(f.path) for f in list_files(table.io, table.location())}
        lost |= {path for path in named_files(table) if same_file(path) not in stored}
    return lost


def tagged_rows(one: World) -> dict[str, list[Any]]:
    """Return the rows that each tag of a replaced revision holds, of its hour and all others."""
    table = one.lake.load(one.job.stream.table)
    columns = ("kafka_partition", "kafka_offset", "event_id")
    found = {}
    for name, ref in table.metadata.refs.items():
        if name not in (*BRANCHES, "staging") and not name.startswith(UNNAMED):
            scan = table.scan(snapshot_id=ref.snapshot_id, selected_fields=columns)
            rows = scan.to_arrow().to_pylist()
            found[name] = sorted(tuple(row[c] for c in columns) for row in rows)
    return found


def died_at(command: Command, step: Step) -> None:
    """Prove that it was killed where it was to be."""
    reached = command.code == KILLED and f"fail point {step.label}: " in command.log
    assert reached, command.log[-3000:]


def play(one: World, number: int, plan: Round, oldest: str) -> int:
    """Both layers into their fail points beside maintenance; the orphans that it deleted."""
    orphans = turn = 0
    asked = ["--hour", oldest, "--restate"] if plan.restate else []
    speed_at, batch_at = (f"{step.label}:{n}" for step, n in (plan.speed, plan.batch))
    deadline = time.monotonic() + 240
    with (
        started(one, "speed", one.name, **{FAIL_AT: speed_at}) as speed,
        started(one, "batch", one.name, *asked, **{FAIL_AT: batch_at}) as batch,
    ):
        while turn < 2 or (
            (speed.code is None or batch.code is None) and time.monotonic() < deadline
        ):
            send_live(one, f"r{number}-{turn}")
            if turn == 0:
                run_into(one, plan.maintain.label, "maintain", one.name)
            else:
                log = run(one, "maintain", one.name)
                orphans += sum(map(int, re.findall(r"(\d+) orphan files deleted, ", log)))
            if turn == 1 and plan.damage:
                run(one, "merge", one.name)
            turn += 1
        died_at(speed, plan.speed[0])
        died_at(batch, plan.batch[0])
    return orphans


@pytest.mark.timeout(1500)
def test_no_night_loses_a_file(world: Make, request: pytest.FixtureRequest) -> None:
    one = world(
        speed={"trigger": "1 second", "max_offsets_per_trigger": 20},
        maintain={"speed_hours": "0 seconds", "orphans_after": "1 day"},
    )

    def age() -> None:
        then = time.time() - DAYS
        for path in shared_folder(request.config).glob(f"services*/**/warehouse/{one.name}/**/*"):
            if path.is_file():
                os.utime(path, (then, then))

    hours = [past_hour(ago) for ago in (4, 3, 2)]
    one.topic()
    send_past(one, hours)
    one.apply()
    orphans, tagged = 0, dict[str, list[Any]]()
    for number, plan in enumerate(ROUNDS):
        if plan.restate:
            # The hour is accepted by then, so that a revision is replaced, and tagged.
            one.batch()
            one.batch(hours[0], restate=True)
            tagged = tagged_rows(one)
        if plan.damage:
            damage(one)
        orphans += play(one, number, plan, hours[0])
        assert lost_files(one) == set()
        age()
    one.reconfigure(speed={"max_offsets_per_trigger": 1000})
    one.speed()
    one.batch()
    for _ in range(2):
        age()
        run(one, "maintain", one.name)
    assert read_runs(one.state.table.properties)[0].is_complete

    # The hazards: there were orphans to delete, and hours to drop.
    assert orphans > 0
    of_speed, of_batch = ({row["ingest_hour"] for row in one.rows(b)} for b in ("speed", "batch"))
    assert of_batch - of_speed >= set(hours)

    sent = filter(is_good, one.sent)
    good = sorted((r.partition, r.offset, json.loads(r.value or b"")["event_id"]) for r in sent)
    assert one.contents() == good
    cuts = [accepted.cut.ranges for accepted in one.state.accepted.values()]
    accepted = [g for g in good if any(c[g[0]][0] <= g[1] < c[g[0]][1] for c in cuts if g[0] in c)]
    assert one.contents("batch") == accepted and len(accepted) >= 60 * len(hours)
    speed = one.contents("speed")
    assert len(speed) == len(set(speed)) and set(speed) == set(good) - set(accepted)
    dead = one.dead_records()
    assert dead == sorted((r.partition, r.offset, r.value) for r in one.sent if not is_good(r))
    assert lost_files(one) == set()
    assert tagged and tagged_rows(one) | tagged == tagged_rows(one), "a tag names what it did"
