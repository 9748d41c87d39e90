"""How many offsets a batch job has to read at most, by which Java's compilers are chosen."""

import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, decide, new_lake
from no_spark import NO_SPARK

from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.config import Environment, sections
from anabranch.iceberg.commits import Change
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.state import SETTLED, Accepted
from anabranch.spark import java, session
from batch_layer import job, stream_run
from batch_layer.job import java_options, run_stream, share_of

SECOND, OPEN = shift(FIRST, 1), shift(FIRST, 2)
BY_SPARK, BY_WORKERS = 500_000, 2_000_000


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Two sealed hours of 10 and 20 offsets, and 5 offsets of the open one."""
    sealed = {FIRST: Cut("t", {0: (0, 10)}), SECOND: Cut("t", {0: (10, 30)})}
    return new_lake(tmp_path, timeline=Timeline(FIRST, OPEN, {0: 30}, sealed=sealed))


def share(lake: StreamLake, span: tuple[str, str] | None, records: int = 35) -> float:
    one = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * records}).adapter)
    return share_of(one, one.kafka, span)


@pytest.mark.parametrize(
    ("span", "offsets"),
    [
        (None, 35), ((FIRST, FIRST), 10), ((FIRST, SECOND), 30), ((SECOND, OPEN), 25),
        ((OPEN, OPEN), 5),
    ],
)  # fmt: skip
def test_offsets_of_the_hours(lake: StreamLake, span: tuple[str, str] | None, offsets: int) -> None:
    assert share(lake, span) == offsets / BY_WORKERS


def test_offsets_of_a_topic_set_back_of_an_archive_and_of_accepted_hours(lake: StreamLake) -> None:
    assert share(lake, None, records=3) == 30 / BY_WORKERS
    archive = sections.Archive.model_validate({"raw": "30 days"})
    archived = replace(lake, stream=lake.stream.model_copy(update={"archive": archive}))
    assert share(archived, None) == 35 / BY_SPARK
    timeline = replace(lake.state().timeline, sealed={SECOND: Cut("t", {0: (10, 30)})})
    accepted = Accepted(1, Cut("t", {0: (0, 10)}))
    lake.land(lake.accept(lake.stage([(FIRST, 0, 1)]), FIRST, accepted, timeline=timeline))
    assert (share(lake, None), share(lake, (FIRST, FIRST))) == (25 / BY_WORKERS, 10 / BY_WORKERS)


def test_a_forgotten_hour_is_as_large_as_the_ledger_has_it(tmp_path: Path) -> None:
    lake = new_lake(tmp_path, timeline=Timeline(FIRST, SECOND, {0: 7}))
    lake.change(Change("batch", properties={SETTLED: SECOND}))
    with pytest.raises(Refused, match=f"hour {FIRST}: expected its cut in the ledger"):
        share(lake, (FIRST, FIRST))
    lake.ledger.record([decide(FIRST, "accepted", 1, Cut("t", {0: (0, 7)}), datetime.now(UTC))])
    assert share(lake, (FIRST, FIRST)) == 7 / BY_WORKERS


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.5, 0.5], java.FIRST_COMPILER),
        ([0.5, 0.6], ""),
        ([0.1, Transient("the broker is unreachable")], ""),
    ],
)
def test_options_by_the_sum_of_the_shares(
    monkeypatch: pytest.MonkeyPatch, shares: list[float | Transient], expected: str
) -> None:
    def share_of(share: Any, kafka: None, span: None) -> float:
        if isinstance(share, Transient):
            raise share
        return float(share)

    monkeypatch.setattr(job, "share_of", share_of)
    assert java_options(cast(Any, shares), cast(Any, None), None) == expected


@pytest.mark.parametrize(
    ("given", "opened"), [(None, "local[*]"), ("spark://h:7077", "spark://h:7077")]
)
def test_spark_opens_at_the_master_that_is_given(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, given: str | None, opened: str
) -> None:
    one = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: []}).adapter)
    masters = list[str]()

    def open_session(environment: Environment, *_: Any) -> Any:
        masters.append(environment.spark.master)
        raise ConfigurationError("no Java here")

    monkeypatch.setattr(session, "open_session", open_session)
    # Without the environment of a JVM.
    monkeypatch.setattr(session, "is_submitted", lambda: True)
    monkeypatch.setattr(job, "java_options", lambda *_: "")
    started = job._spark([one], "a", "stream a", {}, None, given)
    with started as (spark, _), pytest.raises(ConfigurationError, match="no Java here"):
        spark()
    assert masters == [opened]


# Outcomes of a stream's run in a job of many streams.


class Connection:
    """One that throws while it is closed, as a client whose broker is gone may."""

    def close(self, **_: Any) -> None:
        raise OSError("no route to host")


@pytest.mark.parametrize("error", [None, Refused("hour: refused")])
def test_a_run_ends_with_its_outcome_in_any_case(tmp_path: Path, error: Refused | None) -> None:
    lake = new_lake(tmp_path)
    adapter = KafkaAdapter(lake.environment.kafka)
    adapter._admin = adapter._consumer = Connection()
    job = Job(lake.environment, lake.stream, lake.again(), adapter)

    def work(run: stream_run.StreamRun) -> None:
        if error is not None:
            raise error

    outcome = run_stream(job, NO_SPARK, work, threading.Event())
    assert (outcome.stream, outcome.results, outcome.error) == (lake.stream.name, (), error)
    assert adapter._admin is adapter._consumer is None
