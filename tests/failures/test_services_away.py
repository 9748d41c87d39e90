"""Kafka, S3 and the catalog away, slow or failing: tried again, nothing lost, nothing twice.

Each test proves that the fault was there before it compares `main` with what Kafka acknowledged.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from commands import started
from expectations import entry
from running import PUBLISHED, TRIED_AGAIN, await_failure, lines, publishes, speed_running
from waiting import wait_for
from world import Make, World, past_hour, spread

from anabranch import config
from anabranch.cli import main
from anabranch.common.counters import RETRIES
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.fail_points import Step
from anabranch.iceberg import catalog_settings
from anabranch.iceberg.lake import Lake
from anabranch.kafka import source
from anabranch.kafka.client import KafkaAdapter
from anabranch.protocol.measured import MEASURED, read_measured
from batch_layer import build as hours_of_batch
from batch_layer import rebuild, sources, stream_run

if TYPE_CHECKING:
    from broker import ProxiedBroker
    from flaky_s3 import FlakyS3
    from postgres import Postgres
    from toxiproxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
LOST = re.compile(r"commit \w+ of .*: answer lost")
HAD_LANDED = re.compile(r"commit \w+ of .* had landed")
HAD_NOT_LANDED = re.compile(r"commit \w+ of .* had not landed")


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("anabranch", "speed_layer", "batch_layer", "serving_layer"):
        caplog.set_level("INFO", logger=name)


def _assert_exact(one: World, caplog: pytest.LogCaptureFixture) -> None:
    """Every acknowledged record once in `main`, and as many publishes as were logged."""
    assert one.contents() == one.acknowledged()
    assert len(publishes(one)) == len(lines(caplog, PUBLISHED))


def _retried(one: World) -> set[str]:
    """The services for which the failure table requires retries of a job."""
    measured = read_measured(one.state.branch_properties["main"][MEASURED])["speed"]
    return {service for (name, service), n in measured.counts.items() if name == RETRIES and n}


def _small(**changes: object) -> dict[str, object]:
    """Many small micro-batches, so that a fault of seconds meets some of them."""
    return {"speed": {"trigger": "1 second", "max_offsets_per_trigger": 100} | changes}


# Kafka


@pytest.mark.parametrize("fault", ["Kafka cut", "Kafka killed", "S3 cut"])
def test_a_service_that_goes_away_under_a_running_speed_job(
    behind: Make,
    proxied_kafka: ProxiedBroker,
    proxied_s3: Proxy,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    begin, end = {
        "Kafka cut": (proxied_kafka.proxy.cut, proxied_kafka.proxy.restore),
        "Kafka killed": (proxied_kafka.kill, proxied_kafka.start),
        "S3 cut": (proxied_s3.cut, proxied_s3.restore),
    }[fault]
    one = behind(kafka=proxied_kafka.bootstrap_servers, s3=proxied_s3.port, **_small())
    one.send_now(800, "before")
    with speed_running(one):
        wait_for(lambda: one.published > 0, "a first micro-batch to be published")
        begin()
        await_failure(caplog)
        end()
        assert one.published < 800
        one.send_now(300, "after")
        one.await_published(1100)
    assert "transient, try again" in lines(caplog, TRIED_AGAIN)[0]
    assert _retried(one) == {fault.split()[0].lower()}
    _assert_exact(one, caplog)


def test_slow_and_throttled_kafka(
    behind: Make, proxied_kafka: ProxiedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    one = behind(kafka=proxied_kafka.bootstrap_servers, **_small(max_offsets_per_trigger=1000))
    one.send_now(1000, "slow")
    proxied_kafka.proxy.slow(milliseconds=300)
    proxied_kafka.proxy.throttle(kilobytes_per_second=50)
    began = time.monotonic()
    assert one.kafka.describe(one.name) is not None
    assert time.monotonic() - began > 0.2
    one.speed()
    assert not lines(caplog, TRIED_AGAIN)
    _assert_exact(one, caplog)


@pytest.mark.parametrize("reader", ["spark", "this process"])
def test_kafka_cut_while_the_batch_job_reads_an_hour(
    behind: Make,
    proxied_kafka: ProxiedBroker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reader: str,
) -> None:
    one = behind(kafka=proxied_kafka.bootstrap_servers)
    hour = past_hour(2)
    one.send(spread(hour, 200, "h"))
    cuts = once(proxied_kafka.proxy.cut)
    where, name = (source, "read_ranges") if reader == "spark" else (KafkaAdapter, "read_records")
    real = getattr(where, name)

    def read(*arguments: object, **named: object) -> object:
        cuts()
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, read)
    if reader == "spark":
        monkeypatch.setattr(sources, "SMALL", 0)
    with _mended_after_a_failure(proxied_kafka.proxy, caplog):
        results = one.batch()
    assert [r.decision for r in results if r.hour == hour] == ["accepted"]
    assert one.contents("batch") == one.contents() == one.acknowledged()
    assert len(publishes(one, "batch")) == 1


# S3


def test_slow_s3(behind: Make, proxied_s3: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    one = behind(s3=proxied_s3.port, **_small(max_offsets_per_trigger=1000))
    one.send_now(1000, "slow")
    proxied_s3.slow(milliseconds=200)
    proxied_s3.throttle(kilobytes_per_second=200)
    began = time.monotonic()
    assert one.state
    assert time.monotonic() - began > 0.15
    one.speed()
    proxied_s3.restore()
    _assert_exact(one, caplog)


def test_s3_that_fails_at_random_under_speed_and_batch(
    behind: Make, flaky_s3: FlakyS3, caplog: pytest.LogCaptureFixture
) -> None:
    one = behind(s3=flaky_s3.port, **_small(max_offsets_per_trigger=500))
    hours = [past_hour(3), past_hour(2)]
    for hour in hours:
        one.send(spread(hour, 200, hour))
    one.send_now(1000, "now")
    flaky_s3.faults = {"500": 0.05, "503": 0.05, "lost": 0.03, "silence": 0.005}
    one.speed()
    results = one.batch()
    flaky_s3.faults = {}
    assert {"500", "503", "lost"} <= set(flaky_s3.counts), flaky_s3.counts
    assert [r.decision for r in results if r.hour in hours] == ["accepted", "accepted"]
    _assert_exact(one, caplog)
    assert len(publishes(one, "batch")) == 2


def test_s3_that_answers_nothing_but_503_is_tried_again_by_both_jobs(
    behind: Make, flaky_s3: FlakyS3, caplog: pytest.LogCaptureFixture
) -> None:
    one = behind(s3=flaky_s3.port)
    hour = past_hour(2)
    one.send(spread(hour, 200, "h"))
    for run in (one.speed, one.batch):
        caplog.clear()
        flaky_s3.faults = {"503": 1.0}
        with _mended_after_a_failure(flaky_s3, caplog):
            run()
        assert flaky_s3.counts["503"] > 0
    assert one.contents() == one.acknowledged()


def test_s3_failing_in_the_quality_gate_refuses_no_hour(
    behind: Make,
    flaky_s3: FlakyS3,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = behind(s3=flaky_s3.port)
    one.expect(
        entry("expect_column_values_to_not_be_null", column="event_id"),
        entry("expect_table_row_count_to_be_between", min_value=1),
    )
    hour = past_hour(2)
    one.send(spread(hour, 200, "h"))
    # Not the metadata: Iceberg tries to load it twenty times, for two minutes, before Spark hears
    # of it.
    flaky_s3.ending = ".parquet"
    fails = once(lambda: setattr(flaky_s3, "faults", {"503": 1.0}))
    real = hours_of_batch.run_suite

    def run_suite(*arguments: object) -> object:
        fails()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(hours_of_batch, "run_suite", run_suite)
    with _mended_after_a_failure(flaky_s3, caplog):
        results = one.batch()
    assert flaky_s3.counts["503"] > 0
    assert "evaluate the suite" in lines(caplog, TRIED_AGAIN)[0]
    assert [r.decision for r in results if r.hour == hour] == ["accepted"]
    assert one.contents("batch") == one.acknowledged()
    assert len(publishes(one, "batch")) == 1


def test_s3_cut_between_a_restatement_and_its_ledger_row_makes_one_revision(
    behind: Make,
    proxied_s3: Proxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = behind(s3=proxied_s3.port)
    hour = past_hour(2)
    one.send(spread(hour, 200, "h"))
    one.batch()
    cuts = once(proxied_s3.cut)

    def reach(step: Step) -> None:
        if step is Step.BATCH_PUBLISHED:
            cuts()

    monkeypatch.setattr(rebuild, "reach", reach)
    with _mended_after_a_failure(proxied_s3, caplog):
        results = one.batch(hour, restate=True)
    assert [(r.decision, r.revision) for r in results] == [("accepted", 2)]
    assert one.state.accepted[hour].revision == 2
    rows = one.job.ledger.history()
    assert [r.revision for r in rows if r.decision == "accepted" and r.hour == hour] == [1, 2]
    assert one.contents("batch") == one.contents() == one.acknowledged()


# Catalog


def test_sqlite_catalog_locked_by_another_process(
    behind: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path / "locked.db"
    one = behind(catalog=f"sqlite:///{database}", **_small())
    one.send_now(800, "e")
    with speed_running(one):
        wait_for(lambda: one.published > 0, "a first micro-batch to be published")
        with _locked(database):
            await_failure(caplog)
        assert one.published < 800
        one.await_published(800)
    assert any("locked" in line for line in lines(caplog, TRIED_AGAIN))
    assert _retried(one) == {"catalog"}
    _assert_exact(one, caplog)


@pytest.fixture
def proxied_postgres(postgres: Postgres, toxiproxy: object) -> Iterator[Proxy]:
    proxy = toxiproxy.proxy("postgres", postgres.port)  # type: ignore[attr-defined]
    yield proxy
    postgres.execute("DROP TABLE IF EXISTS iceberg_tables, iceberg_namespace_properties CASCADE")
    toxiproxy.remove(proxy)  # type: ignore[attr-defined]


def _on_postgres(behind: Make, postgres: Postgres, proxy: Proxy, staged: bool) -> World:
    """A stream with 500 records, whose commits (of Spark's staging, if `staged`) can be held."""
    uri = f"postgresql+psycopg2://lake:lake-local@127.0.0.1:{proxy.port}/catalog"
    one = behind(catalog=uri, **_small())
    if staged:
        one.leave_writing_to_spark()
    one.send_now(500, "e")
    postgres.guard_commits(spark=staged)
    return one


def test_postgres_restarted_in_the_middle_of_a_publish(
    behind: Make, postgres: Postgres, proxied_postgres: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    one = _on_postgres(behind, postgres, proxied_postgres, staged=False)
    with speed_running(one):
        with postgres.holding_commits():
            wait_for(lambda: postgres.waiting_commits() == 1, "a publish to be inside its COMMIT")
            # As if the machine went down: nothing of the publish has landed.
            postgres.stop(signal.SIGQUIT)
            wait_for(lambda: bool(lines(caplog, LOST)), "the publish's answer to be missed")
            postgres.start()
        one.await_published(500)
    assert lines(caplog, HAD_NOT_LANDED)
    _assert_exact(one, caplog)


@pytest.mark.parametrize("staged", [False, True], ids=["publish", "stage"])
def test_postgres_commit_that_lands_and_whose_answer_is_lost(
    behind: Make,
    postgres: Postgres,
    proxied_postgres: Proxy,
    caplog: pytest.LogCaptureFixture,
    staged: bool,
) -> None:
    one = _on_postgres(behind, postgres, proxied_postgres, staged)
    with speed_running(one):
        with postgres.holding_commits():
            wait_for(lambda: postgres.waiting_commits() == 1, "it to be inside its COMMIT")
            proxied_postgres.cut()
        # The server has not noticed that its client is gone: it commits.
        wait_for(lambda: postgres.waiting_commits() == 0, "it to go on")
        if not staged:
            wait_for(lambda: bool(lines(caplog, LOST)), "it to find that its answer is lost")
        proxied_postgres.restore()
        one.await_published(500)
    assert staged or lines(caplog, HAD_LANDED)
    assert staged or not lines(caplog, HAD_NOT_LANDED)
    _assert_exact(one, caplog)


def test_postgres_that_accepts_and_does_not_answer(
    postgres: Postgres, proxied_postgres: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalog_settings, "PATIENCE_SECONDS", 1)
    uri = f"postgresql+psycopg2://lake:lake-local@127.0.0.1:{proxied_postgres.port}/catalog"
    catalog = config.Catalog(name="lake", uri=uri, warehouse=f"file://{tmp_path}")
    kafka = config.Kafka(bootstrap_servers="127.0.0.1:1")
    lake = Lake(config.Environment(kafka=kafka, catalog=catalog))
    assert not lake.exists("games.events")
    proxied_postgres.lose_answers()
    began = time.monotonic()
    with pytest.raises(Transient, match="the server has not answered for 3 s"):
        lake.exists("games.events")
    assert time.monotonic() - began < 20
    proxied_postgres.restore()
    assert not lake.exists("games.events")


def test_postgres_stage_that_lands_late_while_its_repetition_waits_behind_it(
    behind: Make, postgres: Postgres, proxied_postgres: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    one = _on_postgres(behind, postgres, proxied_postgres, staged=True)
    with speed_running(one):
        with postgres.holding_commits():
            wait_for(lambda: postgres.waiting_commits() == 1, "a stage to be inside its commit")
            proxied_postgres.cut()
            proxied_postgres.restore()
            # By Iceberg's JDBC client, or by the job's next try: a matter of milliseconds.
            wait_for(lambda: postgres.waiting_updates() == 1, "its repetition to wait behind it")
        one.await_published(500)
    _assert_exact(one, caplog)


# Terminal errors, stops, and commands that do not wait


def test_a_wrong_s3_secret_ends_both_jobs(behind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = behind(**_small())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    one.reopen()
    keys = r"check s3\.access_key and s3\.secret_key"
    for run in (one.speed, one.batch):
        with pytest.raises(ConfigurationError, match=keys) as raised:
            run()
        assert raised.value.exit_code == 2
        assert "wrong" not in str(raised.value)
    with started(one, "speed", one.name) as command:
        assert command.wait(90) == 2, command.log
    assert "check s3.access_key and s3.secret_key" in command.log
    assert not TRIED_AGAIN.search(command.log)


@pytest.mark.parametrize(("layer", "code"), [("speed", 0), ("batch", 75)])
def test_sigterm_interrupts_the_wait_for_kafka(
    behind: Make, proxied_kafka: ProxiedBroker, layer: str, code: int
) -> None:
    one = behind(kafka=proxied_kafka.bootstrap_servers, **_small())
    proxied_kafka.proxy.cut()
    with started(one, layer, one.name) as command:
        command.until(lambda: TRIED_AGAIN.search(command.log) is not None, "a failure to be logged")
        began = time.monotonic()
        assert command.terminate(60) == code, command.log[-3000:]
        # A question to Kafka may be under way; a pause may not hold it up.
        assert time.monotonic() - began < 20
        wait_for(lambda: not command.is_alive(), "Spark's Python process to end with its JVM", 20)


def test_a_speed_job_whose_jvm_is_killed_ends(behind: Make) -> None:
    one = behind(**_small())
    one.send_now(50, "e")
    with started(one, "speed", one.name) as command:
        command.until(lambda: one.published > 0, "a first micro-batch to be published")
        command.kill_jvm()
        wait_for(lambda: not command.is_alive(), "Python to end without its JVM", 60)


def test_the_batch_job_gives_up_after_its_time_with_exit_code_75(
    behind: Make,
    proxied_kafka: ProxiedBroker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_run, "RETRY_FOR", timedelta(seconds=3))
    one = behind(kafka=proxied_kafka.bootstrap_servers, batch={"grace": "0 seconds"})
    proxied_kafka.proxy.cut()
    with pytest.raises(Transient, match=r"given up after \d+ tries within 0:00:03") as raised:
        one.batch()
    assert raised.value.exit_code == 75


@pytest.mark.parametrize(
    ("away", "commands"),
    [
        ("kafka", [["status"], ["batch", "--seal-only"]]),
        ("s3", [["apply"], ["hours"], ["merge"], ["status"], ["batch", "--seal-only"]]),
        ("s3 says nothing", [["hours"]]),
    ],
)
def test_a_command_without_spark_fails_within_seconds(
    behind: Make,
    proxied_kafka: ProxiedBroker,
    proxied_s3: Proxy,
    away: str,
    commands: list[list[str]],
) -> None:
    one = behind(kafka=proxied_kafka.bootstrap_servers, s3=proxied_s3.port)
    if away == "s3 says nothing":
        proxied_s3.lose_answers()
    else:
        (proxied_kafka.proxy if away == "kafka" else proxied_s3).cut()
    for command in commands:
        began = time.monotonic()
        result = CliRunner().invoke(main, [*command, one.name, "--conf", str(one.folder)])
        assert time.monotonic() - began < 30
        assert result.exit_code == 75, (command, result.output, result.exception)
        assert "transient, try again" in result.output, command


@contextmanager
def _mended_after_a_failure(
    fault: Proxy | FlakyS3, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Restore the service once a failure was logged with its next try."""
    mend = getattr(fault, "restore", None) or partial(setattr, fault, "faults", {})

    def restore() -> None:
        await_failure(caplog)
        mend()

    with ThreadPoolExecutor() as threads:
        restored = threads.submit(restore)
        yield
    restored.result()
    assert lines(caplog, TRIED_AGAIN)


@contextmanager
def _locked(database: Path) -> Iterator[None]:
    """Another process that holds the database for itself."""
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None); "
        "c.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read(); "
        "c.execute('ROLLBACK')"
    )
    command = [sys.executable, "-c", code, str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        yield
        holder.communicate(timeout=30)
