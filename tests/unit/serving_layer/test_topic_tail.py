"""Rows of `main`, then the records of the topic after them, from a topic in memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from brokers import Broker
from click.testing import CliRunner
from conf_folders import write_environment, write_stream
from lakes import DDL, StreamLake
from proofs import BEFORE, HOUR, NEXT, accept, event, new_proof, read, rebuild, stage_rows

import anabranch
from anabranch import cli, common
from anabranch.common.temporary import process_folder
from anabranch.iceberg.commits import Change
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import Cut, end_of, shift
from anabranch.offsets.position import Ranges, Topic
from anabranch.protocol.erasure import HashedValues, HourFilter, Key
from anabranch.protocol.publish import Publish, new_id
from anabranch.protocol.state import KEPT, Accepted
from serving_layer.reader import RowsThenTopic, selection, topic_tail

OPEN = shift(NEXT, 1)
COUNT = "SELECT count(*) AS n, count(DISTINCT kafka_offset) AS offsets FROM games.events"


@dataclass
class Log(Broker):
    """A topic with values: of partition 0, one good record an offset unless said otherwise."""

    bad: dict[int, bytes | None] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)

    def log_starts(self, topic: Topic) -> dict[int, int]:
        return {p: self.starts.get(p, 0) for p in topic.partitions}

    def read_records(self, topic: str, ranges: Ranges) -> Iterator[tuple[int, list[Any]]]:
        for p, (start, end) in ranges.items():
            values = {o: json.dumps({"id": f"{p}-{o}", "n": o}).encode() for o in range(start, end)}
            yield (
                p,
                [
                    SimpleNamespace(
                        partition=p, offset=o, key=None, value=self.bad.get(o, value), headers=[],
                        timestamp=self.log[p][o],
                    )
                    for o, value in values.items()
                ],
            )  # fmt: skip

    def append(self, count: int) -> None:
        self.log[0] += [self.log[0][-1]] * count

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """4 records of HOUR, 6 of NEXT, 4 of the hour after it."""
    hours = [HOUR] * 4 + [NEXT] * 6 + [OPEN] * 4
    made = Log(log={0: [int(end_of(hour).timestamp() * 1000) - 1000 for hour in hours], 1: []})
    monkeypatch.setattr("anabranch.kafka.client.KafkaAdapter", lambda kafka: made)
    return made


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    """HOUR is accepted; speed has read NEXT to offset 7, and HOUR before the rebuild."""
    made = new_proof(tmp_path)
    # As a position that was set back: NEXT is sealed.
    read(made, [event(0, o, HOUR, n=o) for o in range(4)], {0: 4})
    accept(made, HOUR, BEFORE, [event(0, o, HOUR, n=o) for o in range(4)])
    read(made, [event(0, o, NEXT, n=o) for o in range(4, 7)], {0: 7})
    write_environment(tmp_path)
    write_stream(tmp_path, "events", schema=DDL)
    return made


def then_topic(one: StreamLake, **opened: Any) -> RowsThenTopic:
    return anabranch.open("events", conf=one.folder, **opened).then_topic()


def offsets(batches: Any) -> list[int]:
    return sorted(o for batch in batches for o in batch["kafka_offset"].to_pylist())


def next_offsets(reading: Iterator[Any], count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += next(reading)["kafka_offset"].to_pylist()
    return sorted(found)


def test_each_record_once_with_the_tables_or_selected_columns(one: StreamLake, log: Log) -> None:
    reading = then_topic(one)
    batches = list(reading)
    assert offsets(batches) == list(range(14))
    assert {batch.schema for batch in batches} == {batches[0].schema}
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert all(row["n"] == row["kafka_offset"] for row in rows)
    assert Counter(row["ingest_hour"] for row in rows) == {HOUR: 4, NEXT: 6, OPEN: 4}
    assert (reading.counts.rows, reading.letters) == (7, [])
    assert reading.snapshot_id == heads(one.table())["main"]
    table = anabranch.open("events", conf=one.folder)
    selected = list(table.then_topic(columns=["n"], where="n % 5 = 1", hours=(HOUR, NEXT)))
    assert sorted(n for batch in selected for n in batch["n"].to_pylist()) == [1, 6]
    assert {tuple(batch.schema.names) for batch in selected} == {("n",)}


def test_accepted_hours_alone_then_all_others_unless_main_keeps_rows(
    one: StreamLake, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = then_topic(one, only_accepted=True)
    assert offsets(reading) == list(range(14)) and reading.counts.rows == 10
    monkeypatch.setattr("anabranch.offsets.hours._HOURS_AT_ONCE", 7)
    hours = [hour for batch in then_topic(one) for hour in batch["ingest_hour"].to_pylist()]
    assert Counter(hours) == {HOUR: 4, NEXT: 6, OPEN: 4}
    state, kept = one.state(), {KEPT: json.dumps([NEXT])}
    one.publish(Publish(new_id(), (Change("main", properties=kept),), state.timeline), state)
    with pytest.raises(common.errors.Refused, match=f"which records of hour {NEXT} main has"):
        then_topic(one)


def test_an_earlier_snapshot_whatever_was_rebuilt_since(one: StreamLake, log: Log) -> None:
    before = heads(one.table())["main"]
    rebuild(one, HOUR, BEFORE, 2, [event(0, o, HOUR, n=-1) for o in range(4)])
    read(one, [event(0, o, NEXT, n=o) for o in range(7, 10)], {0: 10})
    reading = then_topic(one, as_of=str(before))
    rows = [row for batch in reading for row in batch.to_pylist()]
    assert sorted(row["kafka_offset"] for row in rows) == list(range(14))
    assert -1 not in {row["n"] for row in rows}, "HOUR as it was before"


def test_following_continues_at_the_end(one: StreamLake, log: Log) -> None:
    reading = iter(anabranch.open("events", conf=one.folder).then_topic(follow=True, every=0.01))
    assert next_offsets(reading, 14) == list(range(14)), "rows, NEXT, and what is after it"
    log.append(2)
    # What the layers publish meanwhile is not read twice.
    read(one, [event(0, o, NEXT, n=o) for o in range(7, 10)], {0: 10})
    assert next_offsets(reading, 2) == [14, 15]
    log.append(1)
    assert next_offsets(reading, 1) == [16]
    log.id = "recreated"
    with pytest.raises(common.errors.PositionError, match="expected id t"):
        next(reading)


def test_dead_letters_and_deleted_offsets_are_counted(one: StreamLake, log: Log) -> None:
    log.starts = {0: 9}
    reading = then_topic(one)
    assert offsets(reading) == [o for o in range(14) if o not in (7, 8)]
    assert (reading.counts.rows, reading.counts.lost) == (5, 2)
    log.starts, log.bad = {}, {2: b"{", 8: b"{", 11: None}
    reading = then_topic(one)
    assert offsets(reading) == [o for o in range(14) if o not in (8, 11)]
    assert (reading.counts.rows, reading.counts.dead) == (5, 2)
    letters = [row for table in reading.letters for row in table.to_pylist()]
    assert [(row["kafka_offset"], row["value"], row["error_code"]) for row in letters] == [
        (8, b"{", "malformed_json"), (11, None, "null_value"),
    ]  # fmt: skip


def test_a_consumer_continues(one: StreamLake, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.job.KafkaAdapter", lambda kafka: log)

    def position(form: str) -> Any:
        arguments = ["status", "events", "--position", form, "--conf", str(one.folder)]
        return CliRunner().invoke(cli.main, arguments)

    assert json.loads(position("spark").stdout) == {"events": {"0": 7, "1": 0}}
    assert position("kafka").stdout == "events,0,7\nevents,1,0\n"
    found = json.loads(position("json").stdout)
    assert found["snapshot_id"] == heads(one.table())["main"]
    assert (found["offsets"], found["again"]) == ({"0": 7, "1": 0}, 0)
    # A later hour that is accepted before: its records come again.
    third = Cut("t", {0: (10, 14), 1: (0, 0)})
    timeline = replace(one.state().timeline, open=shift(OPEN, 1), start={0: 14, 1: 0})
    state = replace(one.state(), timeline=timeline)
    staged = stage_rows(one, [event(0, o, OPEN) for o in range(10, 14)])
    one.publish(one.accept(staged, OPEN, Accepted(1, third), state))
    assert offsets(then_topic(one)) == list(range(14))
    spark = position("spark")
    assert json.loads(spark.stdout) == {"events": {"0": 7, "1": 0}}
    assert "4 offsets are in main too" in spark.stderr


def test_a_live_query_names_what_it_left_out(one: StreamLake, log: Log) -> None:
    log.bad = {12: b"{"}

    def ask(*arguments: str) -> Any:
        return CliRunner().invoke(cli.main, ["query", *arguments, "--conf", str(one.folder)])

    done = ask(COUNT, "--live")
    left = f"games.events: snapshot {heads(one.table())['main']}, then 6 records of the topic (left out: 1 dead letters)"
    expected = [" n  offsets", "--  -------", "13       13", left]
    assert done.stdout.splitlines() == expected, done.output
    assert json.loads(ask(COUNT, "--output", "json").stdout)[0]["n"] == 7
    live = ask(COUNT, "--live", "--only-accepted", "--output", "json")
    assert json.loads(live.stdout) == [{"n": 13, "offsets": 13}]
    assert "then 9 records of the topic (left out: 1 dead letters)" in live.stderr
    log.id = None
    assert "events" in ask("SHOW TABLES", "--live").stdout, "no topic is read"
    revision = ask(COUNT, "--live", "--revision", "1", "--hour", HOUR)
    assert (revision.exit_code, "found --revision" in revision.output) == (2, True)


def test_a_live_query_keeps_no_records_and_no_dead_letters(one: StreamLake, log: Log) -> None:
    """The hazard: a process of many queries, and a topic of dead letters alone."""
    log.bad = {8: b"{", 11: None}
    reader, tails = anabranch.open("events", conf=one.folder).reader, list[Any]()

    def stored() -> list[Path]:
        return [*process_folder("query").glob("*.parquet")]

    with reader.query(COUNT, selection.Selection(), tails=tails) as answer:
        assert answer.rows.read_all().to_pylist() == [{"n": 12, "offsets": 12}]
        assert len(stored()) == 1
    assert not stored()
    assert [(tail.counts.dead, tail.letters) for tail in tails] == [(2, [])]


@pytest.mark.parametrize(
    ("hour", "partition", "offset", "id", "is_gone"),
    [
        (OPEN, 0, 10, "gone", True),
        (OPEN, 0, 12, "gone", False),  # a record after the erasure
        (OPEN, 1, 10, "gone", False),
        (NEXT, 0, 10, "gone", False),
        (OPEN, 0, 10, "kept", False),
        (OPEN, 0, 10, None, False),
        (OPEN, 1, 13, None, True),  # a dead letter
        (NEXT, 1, 13, None, False),
    ],
)
def test_an_erasure_leaves_out_what_it_covers(
    monkeypatch: pytest.MonkeyPatch, hour: str, partition: int, offset: int, id: str | None,
    is_gone: bool
) -> None:  # fmt: skip
    key = Key(b"secret")
    hashed = HashedValues("id", key, frozenset({key.hash("id", "gone")}), {0: (10, 12)})
    filters = (HourFilter(OPEN, (hashed,), frozenset({(1, 13)})),)
    asked = list[object]()
    monkeypatch.setattr(
        topic_tail, "load_filter", lambda *given: asked.append(given[-1]) or filters
    )
    one = SimpleNamespace(
        _lake=SimpleNamespace(environment=None), _stream=SimpleNamespace(hours_table="h"),
        _decided=SimpleNamespace(
            state=SimpleNamespace(erasures=SimpleNamespace(all=[0])),
            position=SimpleNamespace(topic_id="t"),
        ),
    )  # fmt: skip
    places = {"ingest_hour": hour, "kafka_partition": partition, "kafka_offset": offset}
    rows = pa.Table.from_pylist(
        [places | {"id": id}, places | {"id": "other", "kafka_partition": 7, "kafka_offset": 9}]
    )
    erased = topic_tail.TopicTail._erased(one, rows)  # type: ignore[arg-type]
    assert erased.tolist() == [is_gone, False]
    assert asked == [{hour: {partition: (offset, offset + 1), 7: (9, 10)}}]
