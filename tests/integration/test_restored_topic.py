"""A topic of egress beside a bucket and a catalog that are restored, on real Kafka and S3."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from accepted_hours import HOURS, accept, four_hours
from budget import full
from killed import kill_at
from lakes import FIRST, StreamLake, new_environment, new_stream
from pydantic import SecretStr
from soak.backup import copy_catalog

from anabranch import config
from anabranch.common.fail_points import Step
from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.s3 import ObjectStore, open_store
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter, create_topic
from anabranch.protocol import deliveries
from serving_layer import egress

if TYPE_CHECKING:
    from conftest import Neighbours

BUCKET = "lake"


@dataclass(frozen=True)
class Target:
    """A stream in S3, and the topic that gets its hours, four places a transaction. Can be pickled."""

    folder: Path
    s3: config.S3
    kafka: config.Kafka
    topic: str

    @property
    def stream(self) -> config.Stream:
        return new_stream(egress=[{"name": "feed", "topic": self.topic}])

    def deliver(self) -> list[tuple[str, int]]:
        """Deliver what is to be delivered: the hours, and the rows of each."""
        environment = new_environment(self.folder, self.s3).model_copy(update={"kafka": self.kafka})
        # Also in the separate process that a fail point kills.
        few = patch.object(egress, "TRANSACTION_ROWS", 4)
        with few, KafkaAdapter(self.kafka) as kafka:
            job = Job(environment, self.stream, Lake(environment), kafka)
            return [(d.hour, d.rows) for d in egress.deliver(job, job.stream.egress[0])]

    def records(self) -> set[int]:
        """The offsets of a topic's newest values; each has the value of its own row."""
        with KafkaAdapter(self.kafka) as kafka:
            described = kafka.describe(self.topic)
            assert described is not None
            ranges = {p: (0, end) for p, end in kafka.stable_ends(described).items() if end}
            given = [r for _, records in kafka.read_records(self.topic, ranges) for r in records]
        newest = {record.key: record.value for record in given}
        rows = {key: json.loads(value) for key, value in newest.items() if value is not None}
        assert all(key == f"t:0:{row['kafka_offset']}".encode() for key, row in rows.items())
        return {row["kafka_offset"] for row in rows.values()}


def in_main(lake: StreamLake, *hours: str) -> set[int]:
    return {offset for hour, _, offset in lake.rows("main") if hour in hours}


class Backup:
    """The catalog and the bucket, as they are when it is taken."""

    def __init__(self, lake: StreamLake, store: ObjectStore) -> None:
        self._lake, self._store = lake, store
        copy_catalog(lake.folder / "catalog.db", lake.folder / "backup.db")
        self._objects = {key: store.get(BUCKET, key) for key in self._keys()}

    def _keys(self) -> set[str]:
        return {key for key, _, _ in self._store.list_objects(BUCKET, "")}

    def restore(self) -> StreamLake:
        """The lake, as it was then."""
        found = self._keys()
        self._store.delete_objects(BUCKET, sorted(found - self._objects.keys()))
        for key in self._objects.keys() - found:
            self._store.put(BUCKET, key, self._objects[key], "application/octet-stream")
        copy_catalog(self._lake.folder / "backup.db", self._lake.folder / "catalog.db")
        return replace(self._lake, lake=self._lake.again())


@pytest.fixture
def s3(services: Neighbours) -> config.S3:
    return config.S3(
        endpoint=services.s3, access_key=SecretStr(ACCESS_KEY), secret_key=SecretStr(SECRET_KEY)
    )


@pytest.fixture
def store(s3: config.S3) -> ObjectStore:
    opened = open_store(s3)
    opened.ensure_bucket(BUCKET)
    return opened


@pytest.fixture
def target(kafka: config.Kafka, s3: config.S3, tmp_path: Path) -> Target:
    made = Target(tmp_path, s3, kafka, f"t{uuid.uuid4().hex[:12]}")
    create_topic(made.kafka, made.topic, 2, {"cleanup.policy": "compact"})
    return made


@pytest.fixture
def lake(target: Target, store: ObjectStore) -> StreamLake:
    one = four_hours(target.folder, target.s3)
    admin.create(
        one.lake, target.stream.egress_table, deliveries.DELIVERIES_SCHEMA, (),
        admin.TABLE_PROPERTIES,
    )  # fmt: skip
    return one


def test_half_a_restatement_is_sent(lake: StreamLake, target: Target, store: ObjectStore) -> None:
    """The hazard: the restored table has the last complete hour, and nothing is behind it."""
    accept(lake, FIRST, 7)
    assert target.deliver() == [(FIRST, 7)]
    backup = Backup(lake, store)
    accept(lake, FIRST, 5)
    # Killed before the third transaction is committed: the nulls of two rows have been sent.
    kill_at(f"{Step.EGRESS_SENT.label}:3", target.deliver)
    restored = backup.restore()
    sizes = len(target.records()), len(in_main(restored, FIRST))
    assert sizes == (5, 7), "the hazard did not happen"
    assert target.deliver() == [(FIRST, 7)]
    assert target.records() == in_main(restored, FIRST)
    assert target.deliver() == []


@pytest.mark.parametrize("killed", [full(False), True])
def test_lost_deliveries_are_replaced_by_what_main_serves(
    lake: StreamLake, target: Target, store: ObjectStore, killed: bool
) -> None:
    """The hazard: the topic has records that are no rows, and lacks rows."""
    accept(lake, FIRST, 7)
    assert target.deliver() == [(FIRST, 7)]
    backup = Backup(lake, store)
    accept(lake, FIRST, 5)
    accept(lake, HOURS[2], 9)
    assert target.deliver() == [(FIRST, 5), (HOURS[2], 9)]
    restored = backup.restore()
    sizes = len(target.records()), len(in_main(restored, FIRST))
    assert sizes == (14, 7), "the hazard did not happen"
    if killed:
        kill_at(f"{Step.EGRESS_SENT.label}:2", target.deliver)
    assert target.deliver() == [(FIRST, 7)]
    assert in_main(restored, FIRST) <= target.records()
    # Another content than the lost commit had.
    accept(restored, HOURS[2], 6)
    assert target.deliver() == [(HOURS[2], 6)]
    assert target.records() == in_main(restored, FIRST, HOURS[2])
    assert len(target.records()) == 13
    assert target.deliver() == []
