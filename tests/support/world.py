"""A separate stream for a test, with the actions of an operator and a producer."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kafka_admin
import pytest
import yaml
from kafka import TopicPartition
from pyiceberg.manifest import DataFile
from pyspark.sql import SparkSession
from waiting import wait_for

from anabranch import config
from anabranch.common.output import plain
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_hour
from anabranch.job import Job, open_job
from anabranch.kafka.client import KafkaAdapter, create_topic, new_producer
from anabranch.lifecycle.erasure.run import Erased, ErasureRequest, erase
from anabranch.lineage.reporting import report_lineage
from anabranch.offsets.hours import start_of
from anabranch.offsets.position import Topic
from anabranch.operations.reports import status
from anabranch.protocol import apply, ledger
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state
from anabranch.spark.session import LazySpark
from anabranch.spark.settings import session_settings
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result
from batch_layer.stream_run import StreamRun
from speed_layer.job import SpeedJob


def add_catalog(spark: SparkSession, environment: config.Environment) -> None:
    """Add the environment's catalog, of a new name, to the running session."""
    prefix = f"spark.sql.catalog.{environment.catalog.name}"
    for key, value in session_settings(environment).items():
        if key == prefix or key.startswith(f"{prefix}."):
            spark.conf.set(key, value)


SCHEMA = (
    "event_id STRING NOT NULL, player STRING, event_time TIMESTAMP NOT NULL, level INT, amount "
    "DOUBLE"
)


BATCH: dict[str, Any] = {"grace": "0 seconds", "lookback_hours": 1}
ERASURE = {"key": "a key of the tests, and of no other"}
SAME = {"missing": 0, "extra": 0, "changed": 0}
"""The difference of layers that have the same rows, in `hours`."""
Value = tuple[int, datetime, bytes | None]
"""Partition, Kafka timestamp and value of a record."""
Values = Sequence[Value]


@dataclass
class Record:
    """One record that Kafka acknowledged."""

    partition: int
    offset: int
    value: bytes | None


class World:
    """One stream with its own topic, tables and files; the actions of operator and producer."""

    def __init__(
        self, folder: Path, environment: dict[str, Any], spark: SparkSession, **stream: Any
    ) -> None:
        self.spark = spark
        self.folder = folder
        self.name = f"s{uuid.uuid4().hex[:12]}"
        self.sent: list[Record] = []
        (folder / "streams").mkdir(parents=True, exist_ok=True)
        self.environment_file = dict(environment)
        (folder / "anabranch.yaml").write_text(yaml.safe_dump(self.environment_file))
        self._stream: dict[str, Any] = {
            "topic": self.name,
            "table": f"{self.name}.events",
            "format": "json",
            "schema": SCHEMA,
            "key": "event_id",
            "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
            "speed": {"trigger": "1 second", "max_offsets_per_trigger": 1000},
            "batch": BATCH,
        }
        self.configure(**stream)
        self.job: Job = open_job(self.name, str(folder))

    def set_environment(self, **sections: Any) -> None:
        """Replace sections of the environment's file, for later commands and connections."""
        self.environment_file |= sections
        (self.folder / "anabranch.yaml").write_text(yaml.safe_dump(self.environment_file))
        self.reopen()

    def configure(self, **changes: Any) -> None:
        """Change the stream's file, for jobs that are opened later."""
        self._stream |= changes
        (self.folder / "streams" / f"{self.name}.yaml").write_text(yaml.safe_dump(self._stream))

    def write_family(self, pattern: str = "(.*)", **keys: Any) -> None:
        """Write the file of the family `fam`, whose topics begin with this stream's name."""
        topics = {"pattern": f"{self.name}-{pattern}"}
        family = {"topics": topics, "table": f"{self.name}_raw.{{1}}", "key": "event_id"}
        family["group"] = "small"
        (self.folder / "streams" / "fam.yaml").write_text(yaml.safe_dump(family | keys))

    def expect(self, *expectations: dict[str, Any]) -> None:
        """Give the stream a Great Expectations suite."""
        suite = {"name": self.name, "expectations": list(expectations)}
        name = f"{self.name}.expectations.yaml"
        (self.folder / "streams" / name).write_text(yaml.safe_dump(suite))
        self.reconfigure(expectations=name)

    def reconfigure(self, **changes: Any) -> None:
        """Change the stream's file, and open its job again."""
        self.configure(**changes)
        self.reopen()

    def reopen(self) -> None:
        self.job.kafka.close()
        self.job = open_job(self.name, str(self.folder))

    @property
    def lake(self) -> Lake:
        return self.job.lake

    @property
    def kafka(self) -> KafkaAdapter:
        return self.job.kafka

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.lake, self.job.stream)

    @property
    def state(self) -> State:
        return load_state(self.lake, self.job.stream.table)

    @property
    def described(self) -> Topic:
        """The topic as brokers describe it now."""
        topic = self.kafka.describe(self.name)
        assert topic is not None
        return topic

    @property
    def ends(self) -> dict[int, int]:
        return self.kafka.stable_ends(self.described)

    def topic(self, partitions: int = 2, **configs: str) -> None:
        create_topic(self.job.environment.kafka, self.name, partitions, configs)

    def apply(self) -> list[str]:
        return apply.apply(self.job.environment, self.job.stream, self.lake, self.kafka)

    def create(self, partitions: int = 2) -> None:
        self.topic(partitions)
        self.apply()

    def leave_writing_to_spark(self) -> None:
        """Let Spark stage the speed layer's rows: the property is one that Iceberg alone knows."""
        with self.state.table.transaction() as change:
            change.set_properties({"write.parquet.compression-level": "3"})

    def evolve(self, **changes: Any) -> None:
        """Change the stream's file, and apply it."""
        self.reconfigure(**changes)
        self.apply()

    def begin(self, values: Values, **how: Any) -> None:
        """Send to the new stream, whose first hour is that of the first record, and apply it."""
        if values:
            self.send(values, **how)
        self.apply()

    def serve(self, values: Values = (), **how: Any) -> None:
        """The same, and the speed layer publishes."""
        self.begin([*values], **how)
        self.speed()

    def send(
        self, values: Values, key: bytes = b"k", headers: Sequence[tuple[str, bytes]] = ()
    ) -> list[Record]:
        """Send (partition, Kafka timestamp, value) in order; return the acknowledged records."""
        kafka = self.job.environment.kafka
        with closing(new_producer(kafka, max_request_size=4_000_000)) as producer:
            records = self._send(producer, values, key, headers)
        self.sent += records
        return records

    def _send(
        self, producer: Any, values: Values, key: bytes = b"k", headers: Sequence[Any] = ()
    ) -> list[Record]:
        futures = [
            (p, v, producer.send(self.name, v, key, [*headers], p, int(at.timestamp() * 1000)))
            for p, at, v in values
        ]
        producer.flush()
        return [Record(p, f.get(timeout=30).offset, v) for p, v, f in futures]

    def send_transactions(self, *transactions: tuple[bool, Values]) -> None:
        """Send each list as a transaction of its own: committed, or aborted."""
        kafka, id = self.job.environment.kafka, f"{self.name}-tx"
        with closing(new_producer(kafka, transactional_id=id)) as producer:
            producer.init_transactions()
            for committed, values in transactions:
                producer.begin_transaction()
                records = self._send(producer, values)
                if committed:
                    producer.commit_transaction()
                    self.sent += records
                else:
                    producer.abort_transaction()

    def use_whole_log(
        self, hour: str, earlier: Mapping[str, dict[int, int]] = MappingProxyType({})
    ) -> dict[int, int]:
        """Let the whole log be this hour, after earlier ones by their ends, as if the records were as
        old as their control records, which are stamped when they are written."""
        state, ends = self.state, self.ends
        boundaries = {**earlier, hour: ends}
        first = min(boundaries)
        timeline = replace(state.timeline, first=first, open=first, boundaries=boundaries)
        publish = Publish(new_id(), (Change("speed"),), timeline, state.position)
        used = to_commit(state, publish, datetime.now(UTC))
        assert self.lake.commit(state.table, used) is Outcome.LANDED
        return ends

    def send_now(self, count: int, prefix: str, partitions: int = 2) -> None:
        """Send `count` good records with the current time, over the partitions."""
        now = datetime.now(UTC)
        self.send([(i % partitions, now, event(f"{prefix}-{i}", now)) for i in range(count)])

    def send_stamped(self, records: list[tuple[int, int, str]]) -> None:
        """Send good events by partition, milliseconds and name, each in a separate batch."""
        now = datetime.now(UTC)
        with closing(new_producer(self.job.environment.kafka)) as producer:
            for partition, millis, name in records:
                future = producer.send(self.name, event(name, now), b"k", [], partition, millis)
                self.sent.append(Record(partition, future.get(timeout=30).offset, event(name, now)))

    @property
    def published(self) -> int:
        """The number of offsets that the speed layer has published, from the table's position."""
        return sum(self.state.position.offsets.values())

    def await_published(self, count: int, seconds: float = 90) -> None:
        """Wait until the speed layer has published exactly this number of offsets."""
        wait_for(lambda: self.published == count, f"{count} offsets to be published", seconds)

    def delete_topic(self) -> None:
        """Delete the topic with its records, and wait until it is gone."""
        with self.admin() as admin:
            admin.delete_topics([self.name])
            wait_for(lambda: self.name not in admin.list_topics(), "the topic is deleted", 30)

    def admin(self) -> closing[Any]:
        """Return kafka-python's admin client for a `with`, for actions of Kafka's operator."""
        return kafka_admin.admin_of(self.job.environment.kafka.bootstrap_servers)

    def speed(self) -> None:
        """Run the speed job until it has published all present records."""
        SpeedJob(self.job, self.spark, available_now=True).run()

    def batch(
        self, *hours: str, restate: bool = False, accept: bool = False, why: str | None = None
    ) -> list[Result]:
        """Run the work of the batch job, for all waiting hours or for these."""
        with report_lineage(self.job):
            return self._run().rebuild(hours or None, RebuildRequest(restate, accept, why))

    def _run(self) -> StreamRun:
        return StreamRun(self.job, Rebuilder(self.job, LazySpark.of(self.spark)))

    def replay(self, *hours: str) -> list[Result]:
        """Restate hours with dead letters that decode now, of all hours or of these."""
        return self._run().replay(hours or None)

    def erase(self, player: str, *until: timedelta) -> Erased:
        """Erase the records of a player, at the latest `until` from now."""
        request = ErasureRequest("player", frozenset({player}), "case 4711", *until)
        return erase(self.job, self.publisher, request)

    def hours(self) -> list[dict[str, Any]]:
        """The stream's hours as `anabranch hours --output json` prints them."""
        return list(plain(status.hours(self.job)))

    def decision(self, hour: str) -> LedgerRow:
        """The newest decision about an hour."""
        return ledger.newest(self.job.ledger.history([hour]))[hour]

    def account(self, hour: str) -> LedgerRow:
        """The same of an hour that was built, whose account closes, also by partition."""
        row = self.decision(hour)
        counts = row.good, row.dead, row.duplicate, row.gap, row.erased
        assert row.offsets == sum(count or 0 for count in counts)
        assert row.partitions is not None
        assert all(p.total == p.offsets for p in row.partitions.values())
        return row

    def rows(self, branch: str = "main", name: str = "") -> list[dict[str, Any]]:
        """Every row of a branch of the stream's table, or of another one, by its place."""
        table = self.lake.load(name or self.job.stream.table)
        head = table.metadata.refs[branch].snapshot_id
        rows: list[dict[str, Any]] = table.scan(snapshot_id=head).to_arrow().to_pylist()
        return sorted(rows, key=lambda r: (r.get("kafka_partition"), r.get("kafka_offset")))

    def files(self, branch: str = "main") -> list[DataFile]:
        """The data files of a branch."""
        by_hour = files_by_hour(self.state.table, branch).values()
        return [file for by_path in by_hour for file in by_path.values()]

    def dead(self, branch: str = "main") -> list[dict[str, Any]]:
        return self.rows(branch, self.job.stream.dead_letters_table)

    def offsets(self, branch: str = "main") -> list[tuple[int, int]]:
        return [(r["kafka_partition"], r["kafka_offset"]) for r in self.rows(branch)]

    def dead_offsets(self) -> list[tuple[int, int]]:
        return [(d["kafka_partition"], d["kafka_offset"]) for d in self.dead()]

    def dead_records(self) -> list[tuple[int, int, bytes | None]]:
        return [(d["kafka_partition"], d["kafka_offset"], d["value"]) for d in self.dead()]

    def ids(self, branch: str = "main") -> list[str]:
        """The event ids of a branch's rows, sorted; one that is there twice is there twice."""
        return sorted(row["event_id"] for row in self.rows(branch))

    def contents(self, branch: str = "main", hour: str = "") -> list[tuple[int, int, str]]:
        """The exact multiset of a branch's rows, or of an hour's: partition, offset, event id."""
        rows = [r for r in self.rows(branch) if hour in ("", r["ingest_hour"])]
        # A place may have two rows, of the log before a failover and of the one after it.
        return sorted((r["kafka_partition"], r["kafka_offset"], r["event_id"]) for r in rows)

    def set_topic(self, topic: str = "", **settings: str) -> None:
        """Change settings of the stream's topic, or of another one."""
        servers = self.job.environment.kafka.bootstrap_servers
        kafka_admin.set_topic(servers, topic or self.name, **settings)

    def compact_soon(self) -> None:
        kafka_admin.compact_soon(self.job.environment.kafka.bootstrap_servers, 1)

    def delete_records(self, before: dict[int, int]) -> None:
        """Delete the partitions' records before these offsets, as retention does."""
        with self.admin() as admin:
            admin.delete_records({TopicPartition(self.name, p): o for p, o in before.items()})
        starts = self.kafka.log_starts(self.described)
        assert {p: o for p, o in starts.items() if p in before} == before

    def acknowledged(self) -> list[tuple[int, int, str]]:
        """Return the exact multiset of good records that Kafka acknowledged."""
        return sorted(
            (r.partition, r.offset, json.loads(r.value or b"")["event_id"]) for r in self.sent
        )


@contextmanager
def closed_at_the_end() -> Iterator[list[World]]:
    """Provide a list for worlds, whose connections are closed at the end of the `with`."""
    made: list[World] = []
    try:
        yield made
    finally:
        for one in made:
            one.kafka.close()


def event(event_id: str, at: datetime, **fields: Any) -> bytes:
    """Return a good record of the tests' schema."""
    return json.dumps({"event_id": event_id, "event_time": at.isoformat(), **fields}).encode()


Make = Callable[..., World]
"""The fixture `world`."""


def spread(hour: str, count: int, prefix: str, partitions: int = 2) -> list[Value]:
    """Return `count` good records with timestamps in an hour, in order, over all partitions."""
    begin = start_of(hour)
    at = [begin + timedelta(seconds=3600 * (i + 0.5) / count) for i in range(count)]
    made = [event(f"{prefix}-{i}", t, player=f"p{i % 7}", level=i) for i, t in enumerate(at)]
    return [(i % partitions, t, value) for i, (t, value) in enumerate(zip(at, made, strict=True))]


def past_hour(ago: int) -> str:
    """Return the hour `ago` hours ago, such as `2026-11-21T03`."""
    return (datetime.now(UTC) - timedelta(hours=ago)).strftime("%Y-%m-%dT%H")


def hours_of_now(module: dict[str, Any], **ago: int | tuple[int, ...]) -> Any:
    """Return a fixture that sets a module's hours before each test, which may run in a later one."""

    @pytest.fixture(autouse=True)
    def hours(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, of in ago.items():
            hours = past_hour(of) if isinstance(of, int) else [past_hour(one) for one in of]
            monkeypatch.setitem(module, name, hours)

    return hours
