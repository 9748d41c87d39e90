"""Records that workers decode and write: each is a row or a dead letter once."""

import errno
import gc
import hashlib
import json
import os
import random
import signal
import sys
import zipimport
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
import pytest
from budget import full
from flaky_s3 import running_flaky_s3
from pyspark import TaskContext
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from registry import SchemaRegistry, new_avro_stream
from sessions import with_settings
from waiting import wait_for
from wire import varint, wired
from world import SAME, Make, Record, World, event, past_hour, spread
from writers import BY_PYARROW, BY_SPARK, writers

from anabranch.common.errors import Transient, Unexplained
from anabranch.iceberg import rewriting
from anabranch.iceberg.staging import MOST_OPEN_FILES
from anabranch.kafka.source import read_ranges
from anabranch.offsets.hours import start_of
from anabranch.offsets.position import Ranges
from anabranch.records import staged
from anabranch.spark.session import explain_spark
from anabranch.spark.workers import SETTINGS
from speed_layer.micro_batch import MicroBatches

Batches = Iterable[pa.RecordBatch]
NAMES = ("event_id", "player", "event_time", "level", "amount")


@dataclass(frozen=True)
class Workers:
    """The batches that Python workers received, as they record them in files."""

    folder: Path

    @property
    def batches(self) -> list[tuple[int, int]]:
        """The records and the bytes of values of each batch."""
        marks = [path.name.split("-") for path in self.folder.iterdir()]
        return [(int(records), int(size)) for _, _, records, size in marks]

    @property
    def records(self) -> int:
        return sum(records for records, _ in self.batches)


def _beside(monkeypatch: pytest.MonkeyPatch, beside: Callable[[Batches], Batches]) -> None:
    """Have `beside`, which names no module of the tests, stand between Spark and a worker."""
    made = staged._certain_task

    def task(spec: staged.TaskSpec) -> Callable[[Batches], Batches]:
        run = made(spec)

        def run_beside(batches: Batches) -> Batches:
            yield from run(beside(batches))

        return run_beside

    monkeypatch.setattr(staged, "_certain_task", task)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Workers:
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = str(marks)

    def noted(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            task = TaskContext.get().taskAttemptId()
            (Path(folder) / f"{task}-{number}-{len(batch)}-{batch.column('value').nbytes}").touch()
            yield batch

    _beside(monkeypatch, noted)
    return Workers(marks)


Arm = Callable[[World], MicroBatches]


@pytest.fixture
def arm() -> Iterator[Arm]:
    made: list[MicroBatches] = []

    def make(one: World) -> MicroBatches:
        made.append(MicroBatches(one.job))
        return made[-1]

    yield make
    for each in made:
        each.close()


def explained(one: World, error: BaseException) -> Transient:
    """Return the job's view of a micro-batch's error: one that passes after some time."""
    failure = explain_spark(one.spark, "publish a micro-batch", error)
    assert isinstance(failure, Transient) and not isinstance(failure, Unexplained), failure
    return failure


def reader(one: World, ranges: Ranges) -> Callable[[], DataFrame]:
    return lambda: read_ranges(one.spark, one.job.environment.kafka, one.name, ranges)


def publish(one: World, by: MicroBatches, sent: list[Record]) -> None:
    """Publish just these records, which are all of their partitions' next."""
    ends = ranges_of(sent)
    assert by.publish(reader(one, ends), ends) == len(sent)


def ranges_of(sent: list[Record]) -> Ranges:
    ends: Ranges = {}
    for record in sent:
        start, end = ends.get(record.partition, (record.offset, record.offset))
        ends[record.partition] = (min(start, record.offset), max(end, record.offset + 1))
    return ends


def row_of(record: Record) -> tuple[Any, ...]:
    value = json.loads(record.value or b"")
    at = datetime.fromisoformat(value["event_time"])
    values = (value["event_id"], value.get("player"), at, value.get("level"), value.get("amount"))
    return (record.partition, record.offset, *values, at.astimezone(UTC).date())


def rows_of(one: World, branch: str = "main") -> list[tuple[Any, ...]]:
    columns = ("kafka_partition", "kafka_offset", *NAMES, "event_date")
    return [tuple(row[c] for c in columns) for row in one.rows(branch)]


def require_exact(one: World, dead: dict[tuple[int, int], str] | None = None) -> None:
    """Each acknowledged record is a row or the dead letter expected, once, on both branches."""
    dead = dead or {}
    good = [record for record in one.sent if (record.partition, record.offset) not in dead]
    expected = sorted((row_of(record) for record in good), key=lambda row: row[:2])
    assert rows_of(one) == rows_of(one, "speed") == expected
    letters = [
        (d["kafka_partition"], d["kafka_offset"], d["error_code"], d["value"])
        for d in one.dead("speed")
    ]
    values = {(r.partition, r.offset): r.value for r in one.sent}
    assert sorted(letters) == sorted((p, o, code, values[p, o]) for (p, o), code in dead.items())


def test_workers_go_through_neither_imports_nor_archives_at_every_task(spark: SparkSession) -> None:
    def reported_of(batches: Batches) -> Batches:
        finders = sys.path_importer_cache.values()
        archives = sum(isinstance(finder, zipimport.zipimporter) for finder in finders)
        for _ in batches:
            report = {"objects": gc.get_freeze_count(), "archives": archives}
            yield pa.RecordBatch.from_pylist([report])

    [reported] = spark.range(1).mapInArrow(reported_of, "objects BIGINT, archives BIGINT").collect()
    assert reported.objects > 10_000
    assert reported.archives == 0


OTHERS: tuple[tuple[str, str | None], ...] = (
    ("{not json", "malformed_json"),
    ('{"event_id":"once","event_id":"twice","event_time":"@"}', None),
    ('{"event_id":null,"event_time":"@"}', "missing_required"),
    ('{"event_id":"no time"}', "missing_required"),
    ('{"event_id":"long ago","event_time":"2001-01-01T00:00:00Z"}', "event_time_out_of_bounds"),
    ('{"event_id":"a"}{"event_id":"b"}', "malformed_json"),
    ('{"event_id":"level","event_time":"@","level":"five"}', "wrong_type"),
    ('{"event_id":"\\u00e9\\ud83d\\ude00","event_time":"@"}', None),
    ('{"event_id":"escaped","event_time":"@","player":"\\u0041"}', None),
    (' {"event_id":"blank","event_time":"@"} ', None),
    (
        '{"event_id":"nested","event_time":"@","other":{"deep":[1,{"event_id":"x"}]},"level":3}',
        None,
    ),
    ('{"event_id":"list","event_time":"@","other":[{"level":1}]}', None),
    (
        '{"event_id":"unknown","event_time":"@","other":"text","more":5,"level":-1,"amount":0.1}',
        None,
    ),
    ('{"event_id":"unknown again","event_time":"@","other":null,"amount":1e300}', None),
    ('{"event_id":"digits","event_time":"@","amount":0.%s}' % ("1" * 990), None),
)


def test_ordinary_records_with_a_few_others_are_each_a_row_or_a_dead_letter(
    world: Make, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 400}, create=2)
    hour = past_hour(1)
    at = start_of(hour).replace(minute=30, microsecond=123456)
    ordinary = spread(hour, 600, "e")
    dead: dict[int, str] = {}
    for i, (text, code) in enumerate(OTHERS):
        place = 7 + 31 * i
        value = text.replace("@", at.isoformat()).encode()
        ordinary[place] = (ordinary[place][0], ordinary[place][1], value)
        if code is not None:
            dead[place] = code
    null = (1, ordinary[-1][1], None)
    sent = one.send([*ordinary, null])
    codes = {(sent[i].partition, sent[i].offset): code for i, code in dead.items()}
    codes[sent[-1].partition, sent[-1].offset] = "null_value"

    one.speed()

    assert workers.records == 601, "expected every record to be seen by a worker once"
    require_exact(one, codes)
    assert set(writers(one)) == {BY_PYARROW}
    # The batch layer finds the same.
    assert [(r.decision, r.revision) for r in one.batch()] == [("accepted", 1)]
    found = one.hours()[0]
    assert found["diff"].items() >= SAME.items() and found["counts"]["dead"] == len(codes)


def test_files_of_workers_and_of_spark_are_of_one_kind_and_are_rolled_up_together(
    world: Make, workers: Workers
) -> None:
    single = {"trigger": "1 second", "max_offsets_per_trigger": 1, "roll_up": False}
    one = world(speed=single, create=1)
    now = datetime.now(UTC)
    values: list[dict[str, Any]] = [{}, {"level": 5, "amount": 0.5}, {"player": "é", "level": None}]

    one.send([(0, now, event(f"worker-{i}", now, **values[i % 3])) for i in range(9)])
    one.speed()
    assert (writers(one), workers.records) == ({BY_PYARROW: 9}, 9)
    one.leave_writing_to_spark()
    one.send([(0, now, event(f"spark-{i}", now, **values[i % 3])) for i in range(9)])
    one.speed()
    assert (writers(one), workers.records) == ({BY_PYARROW: 9, BY_SPARK: 9}, 9)

    kinds = set()
    for data_file in one.files():
        with rewriting.opened(one.state.table, data_file) as parquet:
            kinds.add(rewriting.schema_text(parquet))
            ids = {f.name: int(f.metadata[b"PARQUET:field_id"]) for f in parquet.schema_arrow}
            assert ids == {f.name: f.field_id for f in one.state.table.schema().fields}
    assert len(kinds) == 1, "\n\n".join(kinds)
    table = f"lake.{one.job.stream.table}"
    by_spark = sorted(map(str, one.spark.table(table).collect()))

    one.reconfigure(speed={"trigger": "1 second"})
    one.speed()

    assert len(one.files()) <= 4, "files of both are put together"
    require_exact(one)
    assert sorted(map(str, one.spark.table(table).collect())) == by_spark


def test_workers_write_any_number_of_dead_letters(world: Make, workers: Workers, arm: Arm) -> None:
    one = world(create=2)
    by, now = arm(one), datetime.now(UTC)
    codes: dict[tuple[int, int], str] = {}
    headers = [("a", b"\xff"), ("a", b"")]
    for dead, good in ((1, 10), (3_000, 10), (0, 10), (20, 0)):
        values = [event(f"e{i}", now, level=i) for i in range(good)] + [b"{"] * dead
        records = one.send([(i % 2, now, value) for i, value in enumerate(values)], headers=headers)
        codes |= {(r.partition, r.offset): "malformed_json" for r in records if r.value == b"{"}
        publish(one, by, records)
        require_exact(one, codes)
    assert set(writers(one)) == {BY_PYARROW}
    assert set(writers(one, one.job.stream.dead_letters_table)) == {BY_PYARROW}
    assert {str(row["headers"]) for row in one.dead()} == {
        str([{"key": key, "value": value} for key, value in headers])
    }


def test_nested_values_of_avro_are_read_by_workers(
    world: Make, workers: Workers, arm: Arm, registry: SchemaRegistry
) -> None:
    one, subject = new_avro_stream(world, registry)
    tags = {"name": "tags", "type": {"type": "array", "items": "int"}}
    schema = {"type": "record", "name": "event", "fields": [{"name": "id", "type": "string"}, tags]}
    id, by = registry.register(subject, schema), arm(one)
    now, value = datetime.now(UTC), wired(id, varint(1) + b"a\0")
    publish(one, by, one.send([(0, now, value) for _ in range(3)]))
    # Once without the schema, and once with it.
    assert workers.records == 6
    publish(one, by, one.send([(0, now, value) for _ in range(3)]))
    assert workers.records == 9
    assert [row["id"] for row in one.rows()] == ["a"] * 6
    assert set(writers(one)) == {BY_PYARROW}


def test_records_of_many_dates_are_written_in_turn(world: Make, workers: Workers) -> None:
    speed = {"trigger": "1 second", "roll_up": False}
    one = world(event_time={"column": "event_time"}, speed=speed, create=2)
    now, count = datetime.now(UTC), 2 * (MOST_OPEN_FILES + 6)
    one.send([(i % 2, now, event(f"e{i}", now - timedelta(days=i))) for i in range(count)])
    one.speed()
    assert workers.records == count
    assert writers(one) == {BY_PYARROW: count}
    require_exact(one)


def test_long_values_reach_a_worker_in_parts(world: Make, workers: Workers) -> None:
    whole = {"trigger": "1 second", "max_offsets_per_trigger": 1000, "roll_up": False}
    one = world(speed=whole, create=1)
    now, count, length = datetime.now(UTC), 200, 500_000
    for start in range(0, count, 50):
        texts = [random.Random(i).randbytes(length // 2).hex() for i in range(start, start + 50)]
        values = [event(f"e{i}", now, player=t, level=i) for i, t in enumerate(texts, start)]
        one.send([(0, now, value) for value in values])

    one.speed()

    assert workers.records == count
    most = int(SETTINGS["spark.sql.execution.arrow.maxBytesPerBatch"])
    assert max(size for _, size in workers.batches) <= most + 2 * length

    def digest(text: str | None) -> bytes:
        return hashlib.sha256((text or "").encode()).digest()

    sent = [(r.offset, digest(json.loads(r.value or b"")["player"])) for r in one.sent]
    assert [(o, digest(text)) for _, o, _, text, *_ in rows_of(one)] == sent
    [data_file] = one.files()
    with rewriting.opened(one.state.table, data_file) as parquet:
        assert parquet.metadata.num_row_groups > 1, "expected it to be written in parts"


def test_a_worker_that_s3_refuses_fails_the_micro_batch_until_access_is_restored(
    world: Make, environment: dict[str, Any], workers: Workers, arm: Arm
) -> None:
    one = world(create=2)
    port = urlparse(environment["s3"]["endpoint"]).port
    assert port is not None
    with running_flaky_s3(port, seed=1) as front:
        # PyIceberg's connections, and with them the workers', go by the front; Spark's own do not.
        one.set_environment(s3=environment["s3"] | {"endpoint": f"http://127.0.0.1:{front.port}"})
        front.ending = ".parquet"
        first = one.send(spread(past_hour(0), 40, "a"))
        publish(one, arm(one), first)
        assert front.kinds["PUT", "parquet"] > 0, "the hazard cannot happen: workers go elsewhere"

        front.faults = {"503": 1.0}
        second = one.send(spread(past_hour(0), 40, "b"))
        with pytest.raises(PythonException) as raised:
            publish(one, arm(one), second)
        assert "AWS Error SLOW_DOWN" in str(explained(one, raised.value))
        assert front.counts["503"] > 0
        assert one.published == 40

        refused = front.counts["503"]
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(one.speed)
            wait_for(lambda: front.counts["503"] > refused, "the job's worker to be refused")
            assert not job.done()
            front.faults = {}
            job.result(timeout=120)
        require_exact(one)
        one.reopen()


def test_a_disk_that_is_full_in_a_worker_passes(
    world: Make, tmp_path: Path, arm: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.touch()
    path = str(full)

    def fails_when_full(batches: Batches) -> Batches:
        yield from batches
        if Path(path).exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    _beside(monkeypatch, fails_when_full)
    one = world(create=2)
    sent = one.send(spread(past_hour(0), 20, "e"))
    by = arm(one)
    with pytest.raises(PythonException) as raised:
        publish(one, by, sent)
    assert "OSError: [Errno 28] No space left on device" in str(explained(one, raised.value))
    assert one.rows() == []
    full.unlink()
    publish(one, by, sent)
    require_exact(one)


@pytest.mark.parametrize("times", [full(1), 4], ids=["once", "until its job fails"])
def test_a_worker_that_is_killed_in_the_midst_of_a_task_costs_nothing(
    world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    kills = tmp_path / "kills"
    kills.mkdir()
    folder = str(kills)

    def killed(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            context = TaskContext.get()
            killed = len(list(Path(folder).iterdir()))
            # The task has taken batches by then, and its files are open.
            if number == 2 and context.partitionId() == 0 and killed < times:
                (Path(folder) / f"{os.getpid()}-{context.taskAttemptId()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    _beside(monkeypatch, killed)
    one = world(create=2)
    one.send(spread(past_hour(1), 200, "e"))
    bad = one.send([(0, start_of(past_hour(1)).replace(minute=59, second=59), b"{broken")])
    with with_settings(one.spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": "10"}):
        one.speed()
    assert len(list(kills.iterdir())) == times, "the hazard did not happen"
    require_exact(one, {(0, bad[0].offset): "malformed_json"})
    assert [r.decision for r in one.batch()] == ["accepted"]


HEAD = "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL"


@pytest.mark.parametrize(
    "stream",
    [
        {"schema": f"{HEAD}, price DECIMAL(9,2)"},
        {"schema": f"{HEAD}, tags ARRAY<STRING>, more MAP<STRING, STRUCT<n: INT, at: TIMESTAMP>>"},
        {"schema": f"{HEAD}, level INT", "format": "csv"},
    ],
    ids=["decimal", "nested", "csv"],
)
def test_all_types_pass_workers_in_both_layers(world: Make, workers: Workers, stream: Any) -> None:
    one = world(**stream, create=2)
    hour = past_hour(1)
    at = start_of(hour).replace(minute=30)

    def value(i: int) -> bytes:
        if stream.get("format") == "csv":
            return f"e{i},{at.isoformat()},{i}".encode()
        more = {"k": {"n": i, "at": at.isoformat()}}
        return event(f"e{i}", at, price=f"{i}.25", tags=[f"t{i}", None], more=more)

    sent = one.send([(i % 2, at, value(i)) for i in range(20)])
    one.speed()
    assert workers.records == 20
    assert set(writers(one)) == {BY_PYARROW}
    by_speed = repr(one.rows())
    assert one.contents() == sorted((r.partition, r.offset, f"e{i}") for i, r in enumerate(sent))
    assert [r.decision for r in one.batch()] == ["accepted"]
    assert one.hours()[0]["diff"].items() >= SAME.items()
    assert set(writers(one)) == {BY_PYARROW}
    assert repr(one.rows()) == by_speed
