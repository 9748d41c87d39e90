"""Maintenance in a loop beside both layers, each killed at one of its steps, and main damaged and
swapped back: exact at the end, and no file is ever gone that a branch, a tag or any remembered
snapshot names.

Between two rounds, when every process is dead, all files are made days old, as if the machine had
been away: what the dead left is of age then, and deleted beside new writers.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from commands import KILLED, Command, run, run_into, started
from pyiceberg.table import Table
from steadiness import shared_folder
from test_fail_points import damage, is_good
from world import World, event, past_hour, spread

from anabranch.common.fail_points import FAIL_AT, Step
from anabranch.iceberg.files import list_files, references, same_file
from anabranch.iceberg.snapshots import BRANCHES, UNNAMED
from anabranch.offsets.hours import start_of
from anabranch.protocol.measured import read_runs

Make = Callable[..., World]
DAYS = 3 * 86_400


@dataclass(frozen=True)
class Round:
    """The steps that the layers and the first maintenance die of, and whether the oldest hour is
    restated and `main` damaged."""

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
    one.send(
        [
            *((i % 2, now, event(f"{prefix}-{i}", now)) for i in range(8)),
            (1, now, b"{broken " + prefix.encode()),
        ]
    )


def tables(one: World) -> list[str]:
    stream = one.job.stream
    return [stream.table, stream.dead_letters_table, *stream.plain_tables]


def named_files(table: Table) -> Iterator[str]:
    """Yield the files that any remembered snapshot names, of any branch and tag: as an engine reads
    it, and as maintenance does."""
    for snapshot in table.snapshots():
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            yield manifest.manifest_path
            yield from (
                entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)
            )
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
            rows = (
                table.scan(snapshot_id=ref.snapshot_id, selected_fields=columns)
                .to_arrow()
                .to_pylist()
            )
            found[name] = sorted(tuple(row[c] for c in columns) for row in rows)
    return found


def died_at(command: Command, step: Step) -> None:
    """Prove that it was killed where it was to be."""
    assert command.code == KILLED and f"fail point {step.label}: " in command.log, command.log[
        -3000:
    ]


def play(one: World, number: int, plan: Round, oldest: str) -> int:
    """Both layers into their fail points, maintenance in a loop beside them; returns how many
    orphans it deleted."""
    orphans = turn = 0
    asked = ["--hour", oldest, "--restate"] if plan.restate else []
    at = {
        key: f"{step.label}:{n}"
        for key, (step, n) in (("speed", plan.speed), ("batch", plan.batch))
    }
    deadline = time.monotonic() + 240
    with (
        started(one, "speed", one.name, **{FAIL_AT: at["speed"]}) as speed,
        started(one, "batch", one.name, *asked, **{FAIL_AT: at["batch"]}) as batch,
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
    dropped = {row["ingest_hour"] for row in one.rows("batch")} - {
        row["ingest_hour"] for row in one.rows("speed")
    }
    assert dropped >= set(hours)

    good = sorted(
        (r.partition, r.offset, json.loads(r.value or b"")["event_id"])
        for r in one.sent
        if is_good(r)
    )
    assert one.contents() == good
    cuts = [accepted.cut.ranges for accepted in one.state.accepted.values()]
    of_batch = [g for g in good if any(c[g[0]][0] <= g[1] < c[g[0]][1] for c in cuts if g[0] in c)]
    assert one.contents("batch") == of_batch and len(of_batch) >= 60 * len(hours)
    speed = one.contents("speed")
    assert len(speed) == len(set(speed)) and set(speed) == set(good) - set(of_batch)
    dead = sorted((d["kafka_partition"], d["kafka_offset"], d["value"]) for d in one.dead())
    assert dead == sorted((r.partition, r.offset, r.value) for r in one.sent if not is_good(r))
    assert lost_files(one) == set()
    assert tagged and tagged_rows(one) | tagged == tagged_rows(one), (
        "what a tag names is what it was"
    )
