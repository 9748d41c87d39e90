"""Faults, one after the other, on the running demo: each is seen where game-day.md says, its
command fixes it, and at the end every record that Kafka acknowledged is served exactly once.

`make game-day` runs it; with `WRITE=1` it writes the page. Needs Go (Toxiproxy, Prometheus), and
root for a small disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from day import FACTOR, SECONDS, Day, Watch, running_day
from demo.audit import game_event_as_sent
from demo.comparison import Reconciliation, ServedRecord, compare
from demo.live import Live
from demo.story import poll
from game_day_page import FILE, Observed, render, skeletons
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from run_books import printed

from anabranch.common.errors import Transient
from anabranch.dev import services
from anabranch.dev.producers.events import Ack, Kind, generate, sha256
from anabranch.dev.producers.produce import STREAM, TOPIC_CONFIGS, produce_events
from anabranch.kafka.client import create_topic, new_producer
from anabranch.offsets import hours
from anabranch.protocol.state import State, load_state

RATE = 10
PAST_HOURS = 4
POISON = 300
UNKNOWN = "season"
PARTITIONS = 3
_HOLD = (
    "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None); "
    "c.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read()"
)


class GameDay:
    """The day's course: sent records, and observations."""

    def __init__(self, day: Day) -> None:
        self.day, self.job, self.story = day, day.job, day.story
        self.acks: list[Ack] = []
        self.observed: list[Observed] = []

    def state(self) -> State:
        return load_state(self.job.lake, self.job.stream.table)

    def brokers(self) -> str:
        return self.job.environment.kafka.bootstrap_servers

    @contextmanager
    def live(self, seed: int) -> Iterator[None]:
        """Events as they happen; their account is added at the end."""
        live = Live(self.job, RATE, seed)
        with live.running():
            yield
        assert live.sent.failed == 0, live.sent.first_error
        self.acks += live.sent.acks

    def send(self, kind: Kind, values: list[bytes], at: datetime) -> None:
        producer, stamp = new_producer(self.job.environment.kafka), int(at.timestamp() * 1000)
        try:
            sent = [
                (
                    v,
                    producer.send(
                        self.job.stream.topic, v, partition=i % PARTITIONS, timestamp_ms=stamp
                    ),
                )
                for i, v in enumerate(values)
            ]
            for value, future in sent:
                done = future.get(timeout=60)
                self.acks.append(Ack(done.partition, done.offset, kind, sha256(value), stamp))
        finally:
            producer.close()

    def send_past(self, of_hours: int, until: datetime, other: dict[str, str]) -> None:
        """Events of the hours until then, of which the last has something that is not as in
        others."""
        past = produce_events(
            self.job.environment.kafka,
            self.job.stream.topic,
            events=500 * of_hours,
            hours=of_hours,
            until=until,
            seed=10 + of_hours,
            dirty=True,
            partitions=PARTITIONS,
        )
        assert past.failed == 0
        self.acks += past.acks
        [record] = generate(
            1, 700 + of_hours, until - timedelta(seconds=2), until - timedelta(seconds=1), False
        )
        assert record.value is not None
        odd = json.loads(record.value) | other
        self.send(
            "good", [json.dumps(odd, separators=(",", ":")).encode()], until - timedelta(seconds=1)
        )

    def await_head(self, behind: int = 3 * RATE) -> None:
        """The speed layer has published all there is, but so many of those that come in."""

        def at_head() -> bool | None:
            topic = self.job.kafka.describe(self.job.stream.topic)
            assert topic is not None
            published = sum(self.state().position.offsets.values())
            return (
                True
                if sum(self.job.kafka.stable_ends(topic).values()) - published <= behind
                else None
            )

        poll(
            at_head, "the speed layer to reach the head", SECONDS, self.day.speed[-1].require_alive
        )

    def await_quiet(self, quiet: Callable[[], bool] | None = None) -> None:
        try:
            poll(
                lambda: True if (quiet or self.day.is_quiet)() else None, "all to be quiet", SECONDS
            )
        except Transient as error:
            reported = {"page": self.day.words(), "alerts": self.day.alerts()}
            raise AssertionError(f"{error}; reported: {reported}") from error

    @contextmanager
    def fault(
        self, name: str, done: str, watch: Watch, command: str = "", instead: str = "",
        quiet: Callable[[], bool] | None = None,
    ) -> Iterator[Watch]:  # fmt: skip
        """Run one fault. The `with` block causes it, lets it be seen and fixes it; its exit waits
        until all is quiet again."""
        self.story.step(name)
        yield watch
        for one in watch.seen:
            self.story.say(f"{one.where}, {one.seconds:.1f} s: {one.says}")
        self.await_quiet(quiet)
        took = time.monotonic() - watch.seen_at
        self.story.say(f"quiet again after {took:.1f} s", "bold green")
        self.observed.append(Observed(name, done, watch.seen, command, instead, took))

    # The course.

    def begin(self) -> str:
        """Past hours of which the last has an event that its gate refuses, and the one before it
        one with a field that the schema does not know; returns the last."""
        until = hours.start_of(hours.hour_of(datetime.now(UTC) - self.job.stream.batch.grace))
        begun = until - timedelta(hours=1)
        self.send_past(PAST_HOURS - 1, begun, {UNKNOWN: "autumn"})
        self.send_past(1, until, {"event_type": "teleport"})
        self.day.space.run("apply", STREAM, show=False)
        return hours.shift(hours.hour_of(until), -1)

    def hours_without_a_rebuild(self, refused: str) -> None:
        gate = Watch(self.day, "refused", "stream.refused", "AnabranchHourRefused")
        drift = Watch(
            self.day,
            "drift",
            "drift",
            "AnabranchSchemaDrift",
            ask_page=lambda: (
                {"drift": said} if UNKNOWN in (said := "\n".join(self.day.words().values())) else {}
            ),
            ask_terminal=lambda: {"drift": said} if UNKNOWN in (said := self.drift_says()) else {},
        )
        with self.fault(
            "Late hour",
            ("The batch layer does not run: hours have ended, and are neither sealed nor rebuilt."),
            Watch(self.day, "waiting", "stream.backlog", "AnabranchHoursWaiting"),
            "anabranch batch STREAM",
            quiet=lambda: (
                "waiting" not in self.day.words()
                and "AnabranchHoursWaiting" not in self.day.alerts()
            ),
        ) as watch:
            self.day.watch()
            watch.start()
            watch.await_all()
            batch = self.day.space.start(
                *printed("anabranch batch STREAM", STREAM=STREAM).split()[1:], **self.day.machine
            )
            line = f"refused hour={refused}"
            poll(lambda: True if line in "".join(batch.log_lines()) else None, line, SECONDS)
            gate.start()
            drift.start()
        with self.fault(
            "Drift",
            "A producer sends a field that the schema does not know; its hour is accepted.",
            drift,
            "anabranch drift STREAM",
            "which prints the stream's new `schema:` and the commands that take the field up",
            quiet=lambda: "AnabranchSchemaDrift" not in self.day.alerts(),
        ):
            drift.await_all()
            poll(lambda: True if batch.code is not None else None, "the batch run to end", SECONDS)
            said = self.drift_says().splitlines()
            [schema] = [line for line in said if line.startswith("schema: ")]
            self.day.space.set_stream(STREAM, **yaml.safe_load(schema))
            for command in (line for line in said if line.startswith("anabranch ")):
                self.day.shell(command)
            self.day.speed[-1].terminate()
            self.day.start_speed()
        command = printed(
            "anabranch batch STREAM --hour HOUR --accept --why TEXT", STREAM=STREAM, HOUR=refused,
            TEXT="'players do teleport since today'",
        )  # fmt: skip
        with self.fault(
            "Gate fails",
            "An event of a type that no expectation knows: the rebuilt hour is refused.",
            gate,
            "anabranch batch STREAM --hour HOUR --accept --why TEXT",
            "or fix the rule, and omit `--accept`",
        ):
            gate.await_all()
            self.day.shell(command)

    def drift_says(self) -> str:
        return self.day.shell(printed("anabranch drift STREAM", STREAM=STREAM))

    def poison_record(self) -> None:
        hour = self.state().timeline.open

        def status() -> dict[str, str]:
            said = self.day.shell(f"anabranch status {STREAM}")
            [line] = [line for line in said.splitlines() if line.startswith("dead letters")]
            return {"dead letters": line} if int(line.split()[-1]) >= POISON else {}

        with self.fault(
            "Poison record",
            f"{POISON} records that are no JSON, beside the good ones.",
            Watch(
                self.day, terminal="dead letters", alert="AnabranchDeadLetters", ask_terminal=status
            ),
            "anabranch dead-letters STREAM --hours A..B",
            "it names reason and bytes; nothing waits for them",
        ) as watch:
            watch.start()
            self.send("malformed", [b"{poison %d" % i for i in range(POISON)], datetime.now(UTC))
            watch.await_all()
            running = hours.hour_of(datetime.now(UTC))
            command = printed(
                "anabranch dead-letters STREAM --hours A..B", STREAM=STREAM, A=hour, B=running
            )
            # Samples are of the first: at the turn of an hour these are others' records.
            reported = self.day.shell(command).splitlines()
            assert (
                sum(int(line.split()[1]) for line in reported if line.startswith("malformed_json "))
                >= POISON
            )

    def broker_down(self) -> None:
        with self.fault(
            "Broker down", "Kafka is killed (`kill -9`).",
            Watch(self.day, "away", "kafka.away", "AnabranchStreamAway"), "anabranch dev up",
        ) as watch:  # fmt: skip
            [kafka] = [
                s for s in services.status(self.day.space.services.home) if s.service == "kafka"
            ]
            assert kafka.pid is not None
            watch.start()
            os.kill(kafka.pid, signal.SIGKILL)
            watch.await_all()
            self.day.shell(printed("anabranch dev up"))

    def s3_slow(self) -> None:
        with self.fault(
            "S3 slow", "Each answer of the object store comes three seconds late.",
            Watch(self.day, "away", "s3.slow", "AnabranchStreamAway"),
            instead="the network and the store are others'; ours goes on by itself",
        ) as watch:  # fmt: skip
            watch.start()
            self.day.s3.slow(3000)
            watch.await_all()
            self.day.s3.restore()

    def catalog_locked(self) -> None:
        file = self.day.space.folder / ".anabranch" / "catalog.db"
        with self.fault(
            "Catalog locked", "Another process has locked the SQLite catalog.",
            Watch(self.day, "away", "catalog.locked", "AnabranchStreamAway"), "fuser FILE",
            "and an end of the process that it names and that is none of ours",
        ) as watch:  # fmt: skip
            holder = subprocess.Popen(
                [sys.executable, "-c", _HOLD, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
                watch.start()
                watch.await_all()
                assert (
                    str(holder.pid) in self.day.shell(printed("fuser FILE", FILE=str(file))).split()
                )
            finally:
                holder.kill()
                holder.communicate()

    def clock_off(self) -> None:
        with self.fault(
            "Clock off",
            "The speed job's machine is ten minutes ahead; exporter and page are elsewhere.",
            Watch(self.day, "late", "s3.clock", "AnabranchSpeedLate"),
            instead="the clock set right, by NTP",
        ) as watch:
            watch.start()
            self.day.set_clock(600)
            watch.await_all()
            self.day.set_clock(0)

    def disk_full(self) -> None:
        disk = self.day.space.temporary
        with self.fault(
            "Disk full", "Something else fills the disk of checkpoints and shuffles, and goes on.",
            Watch(self.day, "late", "local.disk", "AnabranchSpeedLate"), "du -xhd1 FOLDER",
            "and an `rm` of what it names",
        ) as watch:  # fmt: skip
            watch.start()
            with filling(disk / "a-dump"):
                watch.await_all()
                assert "a-dump" in self.day.shell(printed("du -xhd1 FOLDER", FOLDER=str(disk)))
            shutil.rmtree(disk / "a-dump")

    def retention_near(self) -> None:
        command = (
            "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC --add-config "
            "retention.ms=604800000"
        )
        with self.fault(
            "Retention near",
            "The topic's retention is set to eight hours.",
            Watch(self.day, "retention near", "kafka.retention-time", "AnabranchRetentionNear"),
            command,
        ) as watch:
            watch.start()
            with admin(self.brokers()) as kafka:
                eight_hours = {"retention.ms": str(8 * 3_600_000)}
                kafka.alter_configs(
                    [ConfigResource(ConfigResourceType.TOPIC, self.job.stream.topic, eight_hours)]
                )
            watch.await_all()
            self.day.shell(
                printed(
                    "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC "
                    "--add-config retention.ms=604800000",
                    BROKERS=self.brokers(),
                    TOPIC=self.job.stream.topic,
                )
            )

    def zombie(self) -> None:
        hung = self.day.speed[-1]
        with self.fault(
            "Zombie",
            "The speed job hangs (`SIGSTOP`), and comes back when another has taken over.",
            Watch(self.day, "late", "stream.late", "AnabranchSpeedLate"),
            "anabranch speed STREAM",
            "what comes back is refused",
        ) as watch:
            watch.start()
            hung.pause()
            watch.await_all()
            self.day.start_speed()
            self.await_head()
            before = len(hung.log_lines())
            hung.resume()
            refused = ("publish refused", "already published")
            poll(
                lambda: (
                    True
                    if any(w in line for line in hung.log_lines()[before:] for w in refused)
                    else None
                ),
                "the zombie to be refused",
                SECONDS,
            )
            hung.terminate()

    def topic_recreated(self) -> None:
        """No producer runs, and all is read: the records in Kafka are deleted with the topic."""
        topic = self.job.stream.topic
        with self.fault(
            "Topic recreated",
            "The topic is deleted and made again.",
            Watch(self.day, "recreated", "stream.topic-recreated", "AnabranchTopicRecreated"),
            "anabranch adopt STREAM",
            "and the speed job started again",
        ) as watch:
            with admin(self.brokers()) as kafka:
                kafka.delete_topics([topic])
            poll(
                lambda: True if self.job.kafka.describe(topic) is None else None,
                "the topic to be gone",
                SECONDS,
            )
            create_topic(self.job.environment.kafka, topic, PARTITIONS, TOPIC_CONFIGS)
            watch.start()
            watch.await_all()
            ended = self.day.speed[-1]
            poll(lambda: True if ended.code is not None else None, "the speed job to end", SECONDS)
            assert ended.code == 1, ended.log_tail(20)
            self.day.shell(printed("anabranch adopt STREAM", STREAM=STREAM))
            self.day.start_speed()

    # The audit.

    def compare(self, acks: list[Ack], of: Callable[[str], bool], topic_id: str) -> Reconciliation:
        """Reconcile the records of one topic that Kafka acknowledged with those that the topic's
        hours serve."""
        table, letters = (
            self.job.lake.load(name)
            for name in (self.job.stream.table, self.job.stream.dead_letters_table)
        )
        rows = [
            ServedRecord(r["kafka_partition"], r["kafka_offset"], sha256(as_sent(r)))
            for r in table.scan().to_arrow().to_pylist()
            if of(r["ingest_hour"])
        ]
        dead = [
            ServedRecord(r["kafka_partition"], r["kafka_offset"], sha256(r["value"]))
            for r in letters.scan().to_arrow().to_pylist()
            if r["topic_id"] == topic_id
        ]
        state = self.state()
        proven = [
            a.cut.ranges
            for hour, a in state.accepted.items()
            if of(hour) and state.served_by(hour) == "batch"
        ]

        def by_batch(partition: int, offset: int) -> bool:
            return any(
                start <= offset < end
                for r in proven
                if partition in r
                for start, end in (r[partition],)
            )

        return compare(acks, rows, dead, by_batch)


def as_sent(row: Mapping[str, Any]) -> bytes:
    """The bytes of a row's event, with the field that the schema did not know."""
    event = game_event_as_sent(row)
    return (
        event
        if row.get(UNKNOWN) is None
        else event[:-1] + f',"{UNKNOWN}":"{row[UNKNOWN]}"}}'.encode()
    )


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """A process that fills a disk, as a dump or an endless log does."""
    over = threading.Event()
    folder.mkdir()

    def fill() -> None:
        with (folder / "core").open("wb", buffering=0) as file:
            size = 1 << 20
            while not over.is_set():
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size = 1 << 12
                    over.wait(0.02)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


@contextmanager
def admin(servers: str) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=servers)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.timeout(2400)
def test_a_game_day(tmp_path: Path) -> None:
    began = time.monotonic()
    with running_day(tmp_path) as day:
        one = GameDay(day)
        refused = one.begin()
        day.start_speed()
        one.await_head(0)
        with one.live(2):
            one.hours_without_a_rebuild(refused)
            one.poison_record()
            one.broker_down()
            one.s3_slow()
            one.catalog_locked()
            one.clock_off()
            one.disk_full()
            one.retention_near()
            one.zombie()
        one.await_head(0)
        first_id, first = one.state().position.topic_id, one.acks
        one.acks = []
        one.topic_recreated()
        with one.live(3):
            poll(
                lambda: True if sum(one.state().position.offsets.values()) > 5 * RATE else None,
                "new rows",
                SECONDS,
            )
        one.await_head(0)
        adopted = one.state().timeline.open
        accounts = [
            one.compare(first, lambda hour: hour < adopted, first_id),
            one.compare(one.acks, lambda hour: hour >= adopted, one.state().position.topic_id),
        ]
    audit = [line for account in accounts for line in account.sentences()]
    assert all(account.is_exact for account in accounts), "\n".join(audit)
    assert all(account.rows > 5 * RATE for account in accounts)
    if os.environ.get("WRITE"):
        FILE.write_text(
            render(one.observed, audit, FACTOR, (time.monotonic() - began) / 60), encoding="utf-8"
        )
    assert [o.skeleton for o in one.observed] == skeletons(FILE.read_text(encoding="utf-8"))
