"""The requests to S3 that an hour without records costs, in a process of its own each hour."""

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from budget import full
from data_files import record_data_file_reads
from pyiceberg.manifest import clear_manifest_cache
from pyspark.sql import SparkSession
from rest_catalog import running_rest_catalog
from world import World, add_catalog, closed_at_the_end, past_hour, spread

from anabranch.common.counters import S3_REQUESTS, TALLY
from anabranch.config import load_environment
from anabranch.iceberg import s3
from anabranch.iceberg.s3 import ObjectStore
from anabranch.job import open_job
from anabranch.protocol import ledger, state
from anabranch.protocol.ledger import Ledger
from anabranch.spark.session import LazySpark
from batch_layer.job import run_stream
from batch_layer.rebuild import RebuildRequest

IDLE = 8
ORDER = RebuildRequest()

# Counts by catalog: its client, or the server, reads and writes files of its own.
PUTS = {"sql": 6, "rest": 4}
REQUESTS = {"sql": 6 + 4, "rest": 4 + 3}
# Here every third hour moves all branches. In production it is every 37th hour, or maintenance.
MOVES_ALL = (0, 0, 1, 0, 0, 1, 0, 0)
# The table of dead letters is loaded while an hour with records is listed.
LISTED, LOADS = (1, 1, 1, 1, 1, 0, 0, 0), {"sql": 1, "rest": 0}


def requests() -> Counter[str]:
    return Counter({label: n for (name, label), n in TALLY.totals().items() if name == S3_REQUESTS})


@pytest.fixture
def parquet_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files that are read, which the counts lack."""
    return record_data_file_reads(monkeypatch)


def forget(one: World) -> None:
    """Forget what another process does not know."""
    for known in (ledger._IDS, ledger._REMARKABLE):
        known._known.clear()
    clear_manifest_cache()
    s3.open_store(one.job.environment.s3)._answered = None


@pytest.fixture(params=["sql", full("rest")])
def catalog(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def one(
    catalog: str, environment: dict[str, Any], spark: SparkSession, tmp_path: Path
) -> Iterator[World]:
    stream = {"batch": {"grace": f"{IDLE + 1} hours", "lookback_hours": 1}}
    with closed_at_the_end() as made:
        if catalog == "sql":
            made.append(World(tmp_path / "conf", environment, spark, **stream))
            yield made[0]
            return
        s3 = environment["s3"]["endpoint"]
        with running_rest_catalog(tmp_path, "s3://tests/rest", s3) as rest:
            block = {"name": f"c{uuid.uuid4().hex[:12]}", "type": "rest", "uri": rest.url}
            own = environment | {"catalog": block | {"warehouse": "s3://tests/rest"}}
            made.append(World(tmp_path / "conf", own, spark, **stream))
            add_catalog(spark, made[0].job.environment)
            yield made[0]


def test_an_hour_without_records_is_accepted_by_few_requests(
    one: World, catalog: str, parquet_reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MAX_MAIN_ONLY_HOURS", 2)
    monkeypatch.setattr(state, "REMEMBERED_HOURS", 1)
    one.topic()
    one.serve(spread(past_hour(IDLE + 2), 4, "before"))
    one.batch()
    costs = []
    for ago in range(IDLE, 0, -1):
        hour = past_hour(ago + 1)
        one.configure(batch={"grace": f"{ago} hours", "lookback_hours": 1})
        forget(one)
        parquet_reads.clear()
        before = requests()
        job = open_job(one.name, str(one.folder))
        outcome = run_stream(
            job, LazySpark.of(one.spark), lambda run: run.rebuild(None, ORDER), threading.Event()
        )
        costs.append(requests() - before)
        assert [(r.hour, r.decision) for r in outcome.results] == [(hour, "accepted")]
        assert parquet_reads == []
    # One commit of the stream's table and one of its ledger.
    assert [cost["PutObject"] for cost in costs] == [PUTS[catalog] + 2 * n for n in MOVES_ALL]
    assert [cost.total() for cost in costs] == [
        REQUESTS[catalog] + 4 * moved + LOADS[catalog] * listed
        for moved, listed in zip(MOVES_ALL, LISTED, strict=True)
    ], costs
    rows = Ledger(one.lake, one.job.stream.hours_table).history()[-2 * IDLE :]
    idle = [past_hour(ago + 1) for ago in range(IDLE, 0, -1)]
    decided = [(hour, decision) for hour in idle for decision in ("sealed", "accepted")]
    assert [(row.hour, row.decision) for row in rows] == decided


def test_the_stores_time_is_that_of_its_last_answer_for_a_minute(
    environment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    store = ObjectStore(load_environment(str(tmp_path)).s3)
    before = requests()
    first = store.time_now("tests")
    assert requests() - before == {"HeadBucket": 1}, "there was no answer yet"
    assert store.has_bucket("tests") and store.find("tests", "no-such-object") is None
    asked, now = requests(), s3.elapsed_seconds()
    for later in (0.0, 59.0):
        monkeypatch.setattr(s3, "elapsed_seconds", lambda later=later: now + later)
        passed = store.time_now("tests") - first
        assert timedelta(seconds=later) <= passed <= timedelta(seconds=later + 30)
    assert requests() == asked
    monkeypatch.setattr(s3, "elapsed_seconds", lambda: now + 60.0)
    assert abs(store.time_now("tests") - datetime.now(UTC)) < timedelta(seconds=30)
    assert requests() - asked == {"HeadBucket": 1}, "the answer is too old"
