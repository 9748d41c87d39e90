"""Every operation that other programs run on Iceberg tables, by Spark and PyIceberg, on a stream that
stands still and on one that moves: afterwards both layers and the audit go on, exact.

All files are days old when orphan removal runs, as on a stream that stood still over a weekend.
"""

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from run_books import printed
from world import Make, World, event, past_hour, spread

from anabranch.iceberg.snapshots import PUBLISHED, ancestors_to_last_publish, heads, is_publish
from anabranch.operations.audit import audit
from anabranch.protocol.acts import serve_hour

Operation = Callable[["Stream"], None]
DAYS = 3 * 86_400
# What Iceberg says if another commit came first, to `rewrite_manifests` if it merged manifests.
OVERTAKEN = ("CommitFailedException", "could not be found in the latest snapshot")


class Stream:
    """A stream with accepted, overridden and running hours, and what a platform does to it."""

    def __init__(self, one: World, base: Path, seed: int) -> None:
        self.one, self._base, self.dice = one, base, random.Random(seed)
        self.moves = False
        print(f"seed {seed}")
        one.topic()
        self.accepted, self.overridden, last = (past_hour(ago) for ago in (3, 2, 1))
        for hour in (self.accepted, self.overridden, last):
            broken = (0, spread(hour, 1, "x")[0][1], b"{broken " + hour.encode())
            one.send([*spread(hour, 20, hour), broken])
        one.serve()
        assert {r.decision for r in one.batch()} == {"accepted"}
        serve_hour(one.publisher, self.overridden, "speed", "a test")
        self.arrive("first")

    def arrive(self, prefix: str) -> None:
        """Records of now, by the speed layer."""
        now = datetime.now(UTC)
        good = [(i % 2, now, event(f"{prefix}-{i}", now)) for i in range(6)]
        self.one.send([*good, (1, now, b"{broken " + prefix.encode())])
        self.one.speed()

    def check(self) -> None:
        """Exact, with what was said by operators."""
        good = [r for r in self.one.sent if not (r.value or b"").startswith(b"{broken")]
        names = [json.loads(r.value or b"")["event_id"] for r in good]
        places = zip(good, names, strict=True)
        assert self.one.contents() == sorted((r.partition, r.offset, name) for r, name in places)
        dead = self.one.dead_offsets()
        assert dead == sorted((r.partition, r.offset) for r in self.one.sent if r not in good)
        assert self.one.state.served_by(self.accepted) == "batch"

    def finish(self) -> None:
        """Restatement, another micro-batch, an override lifted; and the audit closes."""
        one, hour = self.one, self.accepted
        assert {r.decision for r in one.batch(hour, restate=True)} == {"accepted"}
        serve_hour(one.publisher, self.overridden, "auto", "a test")
        self.arrive("last")
        self.check()
        report = audit(one.job, None, with_kafka=True)
        assert report.agrees, json.dumps(report.as_dict(), indent=1, default=str)
        assert len(report.hours) >= 3

    @property
    def tables(self) -> list[str]:
        stream = self.one.job.stream
        return [stream.table, stream.dead_letters_table, stream.hours_table]

    def age(self) -> None:
        """Make files days old: all, or those that no attempt is still writing."""
        then, written = time.time() - DAYS, time.time() - (60 if self.moves else 0)
        for path in self._base.glob(f"services*/**/warehouse/{self.one.name}/**/*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_mtime < written:
                    os.utime(path, (then, then))

    def call(self, table: str, procedure: str, *arguments: str) -> None:
        name = self.one.job.environment.catalog.name
        given = ", ".join((f"table => '{table}'", *arguments))
        self.sql(f"CALL {name}.system.{procedure}({given})")

    def sql(self, statement: str) -> None:
        """Run a statement as its user would: again if another commit came first."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.one.spark.sql(statement).collect()
                return
            except Py4JJavaError as error:
                overtaken = any(text in str(error) for text in OVERTAKEN)
                if not overtaken or time.monotonic() > deadline:
                    raise

    def set_main(self, back: int) -> int:
        """The publish of `main` so many before its newest."""
        table = self.one.lake.load(self.tables[0])
        snapshot = ancestors_to_last_publish(table, "main")[-1]
        for _ in range(back):
            parent = table.metadata.snapshot_by_id(snapshot.parent_snapshot_id or 0)
            if parent is None or not is_publish(parent):
                break
            snapshot = parent
        return snapshot.snapshot_id


def timestamp(ago: timedelta) -> str:
    return f"older_than => TIMESTAMP '{datetime.now(UTC) - ago:%Y-%m-%d %H:%M:%S.%f}'"


def rewrite_data_files(s: Stream) -> None:
    for table in s.tables:
        s.call(table, "rewrite_data_files", "options => map('rewrite-all', 'true')")


def rewrite_manifests(s: Stream) -> None:
    for table in s.tables:
        s.call(table, "rewrite_manifests", "use_caching => false")


def expire_snapshots(s: Stream) -> None:
    for table in s.tables:
        s.call(table, "expire_snapshots", timestamp(timedelta(0)), "retain_last => 1")


def remove_orphans_of_a_day(s: Stream) -> None:
    s.age()
    day = timestamp(timedelta(hours=24, minutes=1))
    for table in s.tables:
        s.call(table, "remove_orphan_files", day, "prefix_listing => true")


def remove_orphans_of_an_hour(s: Stream) -> None:
    """The procedure refuses less than a day; its Java API does not."""
    s.age()
    java = s.one.spark._jvm
    for table in s.tables:
        loaded = java.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(
            s.one.spark._jsparkSession, f"{s.one.job.environment.catalog.name}.{table}"
        )
        action = java.org.apache.iceberg.spark.actions.SparkActions.get().deleteOrphanFiles(loaded)
        action.usePrefixListing(True).olderThan(int((time.time() - 3600) * 1000)).execute()


def compute_table_stats(s: Stream) -> None:
    for table in s.tables:
        s.call(table, "compute_table_stats")


def roll_main_back(s: Stream) -> None:
    s.call(s.tables[0], "rollback_to_snapshot", f"snapshot_id => {s.set_main(2)}")


def set_main(s: Stream) -> None:
    s.call(s.tables[0], "set_current_snapshot", f"snapshot_id => {s.set_main(1)}")


def use_a_foreign_branch(s: Stream) -> None:
    name = f"{s.one.job.environment.catalog.name}.{s.tables[0]}"
    s.sql(f"ALTER TABLE {name} CREATE OR REPLACE BRANCH audits AS OF VERSION {s.set_main(1)}")
    s.call(s.tables[0], "fast_forward", "branch => 'audits'", "to => 'main'")
    s.sql(f"ALTER TABLE {name} DROP BRANCH audits")


def expire_by_pyiceberg(s: Stream) -> None:
    for table in s.tables:
        s.one.lake.load(table).maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()


def alter_properties(s: Stream) -> None:
    name = f"{s.one.job.environment.catalog.name}.{s.tables[0]}"
    s.sql(
        f"ALTER TABLE {name} SET TBLPROPERTIES ('team' = 'platform', 'read.split.target-size' = "
        "'1048576')"
    )
    s.sql(f"ALTER TABLE {name} UNSET TBLPROPERTIES ('read.split.target-size')")
    s.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('history.expire.max-ref-age-ms' = '604800000')")
    namespace, table = s.tables[0].split(".")
    of = {"NAMESPACE": namespace, "NAME": table}
    s.sql(
        printed(
            "ALTER TABLE lake.NAMESPACE.NAME UNSET TBLPROPERTIES ('history.expire.max-ref-age-ms')",
            **of,
        )
    )


OPERATIONS: list[Operation] = [
    rewrite_data_files, rewrite_manifests, expire_snapshots, remove_orphans_of_a_day,
    remove_orphans_of_an_hour, compute_table_stats, roll_main_back, set_main, use_a_foreign_branch,
    expire_by_pyiceberg, alter_properties,
]  # fmt: skip
NIGHT: list[Operation] = [
    rewrite_data_files, rewrite_manifests, expire_snapshots, remove_orphans_of_a_day,
]  # fmt: skip


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("FOREIGN_SEED", time.time_ns() % 1_000_000))


@pytest.mark.timeout(1500)
def test_each_operation_on_an_idle_stream(
    world: Make, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    stream = Stream(world(), tmp_path_factory.getbasetemp(), seed)
    for operation in OPERATIONS:
        print(operation.__name__)
        operation(stream)
        stream.arrive(operation.__name__)
        stream.check()
    stream.finish()


@pytest.mark.timeout(1500)
def test_nights_of_maintenance_and_operations_at_random_without_a_publish_between(
    world: Make, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    stream = Stream(world(), tmp_path_factory.getbasetemp(), seed)
    for operation in [*NIGHT, *NIGHT]:
        operation(stream)
    # The hazard: the head of main says nothing, and what it was made from is expired.
    table = stream.one.lake.load(stream.tables[0])
    assert not is_publish(ancestors_to_last_publish(table, "main")[-1])
    assert stream.one.state.overrides == {stream.overridden: "speed"}
    stream.check()
    stream.arrive("after two nights")
    stream.check()
    # A rollback needs its publish in main's history; not between these.
    rollbacks = (roll_main_back, set_main)
    for operation in stream.dice.sample([o for o in OPERATIONS if o not in rollbacks], 9):
        print(operation.__name__)
        operation(stream)
    for operation in rollbacks:
        operation(stream)
        assert stream.one.state.overrides == {stream.overridden: "speed"}
        stream.arrive(operation.__name__)
        stream.check()
    stream.finish()


@pytest.mark.timeout(1500)
def test_operations_at_random_on_a_stream_that_moves(
    world: Make, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    stream = Stream(world(), tmp_path_factory.getbasetemp(), seed)
    stop, failed = threading.Event(), list[BaseException]()

    def move() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                stream.arrive(f"moves-{number}")
            except BaseException as error:
                failed.append(error)
                return

    stream.moves = True
    thread = threading.Thread(target=move)
    before = heads(stream.one.lake.load(stream.tables[0]))
    thread.start()
    try:
        for _ in range(8):
            operation = stream.dice.choice([o for o in OPERATIONS if o is not roll_main_back])
            print(operation.__name__)
            operation(stream)
    finally:
        stop.set()
        thread.join(120)
    assert not failed, failed
    after = heads(stream.one.lake.load(stream.tables[0]))
    assert after["speed"] != before["speed"], "the hazard did not happen"
    stream.finish()


def test_the_newest_tag_is_read(world: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An operator can set main back to this tag, whatever was expired."""
    stream = Stream(world(), tmp_path_factory.getbasetemp(), 0)
    stream.call(stream.tables[0], "rewrite_data_files", "options => map('rewrite-all', 'true')")
    name = f"{stream.one.job.environment.catalog.name}.{stream.tables[0]}"
    newest = f"SELECT event_id FROM {name} VERSION AS OF '{PUBLISHED}main'"
    assert stream.one.spark.sql(newest).count() == len(stream.one.contents())
