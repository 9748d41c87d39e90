"""A stream with `select`: masked, renamed and computed columns in both layers."""

import hashlib
import hmac
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from world import Make, event, past_hour, spread

from anabranch import config, records
from anabranch.common.errors import AnabranchError
from anabranch.config.columns import parse_columns
from anabranch.config.select import parse_select
from anabranch.offsets.hours import start_of
from anabranch.subjects.schemas import Schemas

SECRET = "0123456789abcdef"


def test_a_stream_masks_in_both_layers_alike(world: Make) -> None:
    one = world()
    one.set_environment(masking={"secret": SECRET})
    low = "(CASE level WHEN 99 THEN 'x' ELSE level::VARCHAR END)::INT"
    select = [
        "event_id",
        "event_time",
        {"who": {"hash": "player"}},
        {"first": {"truncate": "player", "to": 1}},
        {"double_level": {"sql": "level * 2", "type": "INT"}},
        {"low": {"sql": low, "type": "INT"}},
        {"topic": {"kafka": "topic"}},
        {"key": {"kafka": "key", "type": "STRING"}},
    ]
    one.reconfigure(select=select)
    hour = past_hour(1)
    one.topic()
    one.send(spread(hour, 8, "masked"))
    one.send([(0, start_of(hour) + timedelta(minutes=9), event("bad", start_of(hour), level=99))])
    one.serve([(0, datetime.now(UTC), event("now", datetime.now(UTC), player="p1", level=4))])
    by_speed = {r["event_id"]: r for r in one.rows()}
    # The layers have equal rows.
    [result] = [r for r in one.batch() if r.hour == hour]
    diff = one.decision(hour).diff
    assert result.decision == "accepted" and diff is not None
    assert (diff.missing, diff.extra, diff.changed) == (0, 0, 0)
    for branch in ("speed", "batch"):
        [letter] = one.dead(branch)
        assert letter["error_code"] == "select_failed" and letter["error_text"].startswith("low: ")
        assert letter["value"] == event("bad", start_of(hour), level=99)
    columns = ("who", "first", "double_level", "low", "topic", "key")
    assert len(by_speed) == 9 and {r["event_id"]: [r[c] for c in columns] for r in one.rows()} == {
        name: [r[c] for c in columns] for name, r in by_speed.items()
    }
    hashed = hmac.new(SECRET.encode(), b"p1", hashlib.sha256).hexdigest()
    assert [by_speed["now"][c] for c in columns] == [hashed, "p", 8, 4, one.name, "k"]
    assert "player" not in by_speed["now"]

    # Columns are added to the selected ones, as to any; a selected one is not dropped.
    one.reconfigure(select=[*select, {"day": {"truncate": "event_time", "to": "day"}}])
    with pytest.raises(AnabranchError, match="anabranch apply"):
        one.speed()
    one.apply()
    one.send([(1, datetime.now(UTC), event("later", datetime.now(UTC)))])
    one.speed()
    days = {r["event_id"]: r["day"] for r in one.rows()}
    assert days.pop("later").hour == 0 and {*days.values()} == {None}
    [result] = one.batch(hour, restate=True)
    assert result.decision == "accepted" and sum(r["day"] is not None for r in one.rows()) == 9
    one.reconfigure(select=select[:-1])
    with pytest.raises(AnabranchError, match=r"key|day"):
        one.apply()


def test_the_secret_is_in_no_plan_and_no_event_log(spark: SparkSession, tmp_path: Path) -> None:
    fields = parse_columns("id STRING, s STRING")
    selected = parse_select([{"mail": {"hash": "s"}}, {"id": {"hash": "id"}}], fields)
    keys = {"name": "events", "topic": "t", "table": "a.b", "schema": "x STRING", "key": "id"}
    columns = tuple(one.column for one in selected)
    stream = config.Stream(**keys, select=selected, fields=fields, columns=columns)
    source = (
        "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, headers "
        "ARRAY<STRUCT<key: STRING, value: BINARY>>, ingest_hour STRING"
    )
    frame = spark.createDataFrame(
        [(None, b'{"id":"x","s":"Ann"}', 0, 0, datetime.now(UTC), None, "2026-11-21T03")], source
    )
    plans = io.StringIO()
    with event_log(spark, tmp_path) as log:
        rows = records.decode(frame, stream, Schemas(stream, None), secret=SECRET.encode())
        [row] = rows.collect()
        with redirect_stdout(plans):
            for mode in ("extended", "formatted", "codegen", "cost"):
                rows.explain(mode=mode)
    assert row.mail == hmac.new(SECRET.encode(), b"Ann", "sha256").hexdigest()
    for text in (plans.getvalue(), log.read_text()):
        # The hazard: a plan shows the task that has the secret.
        assert "_DecodeTask" in text or "mapInArrow" in text or "MapInArrow" in text
        assert SECRET not in text and SECRET.encode().hex() not in text


@contextmanager
def event_log(spark: SparkSession, folder: Path) -> Iterator[Path]:
    """Write Spark's event log of the block to a file."""
    jvm: Any = spark.sparkContext._jvm
    context: Any = spark.sparkContext._jsc
    context = context.sc()
    conf = context.getConf().set("spark.eventLog.compress", "false")
    conf = conf.set("spark.eventLog.rolling.enabled", "false")
    none = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    log = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "masking", none, jvm.java.net.URI(f"file://{folder}"), conf, context.hadoopConfiguration()
    )
    log.start()
    context.addSparkListener(log)
    try:
        yield folder / "masking"
        context.listenerBus().waitUntilEmpty()
    finally:
        context.removeSparkListener(log)
        log.stop()
