"""Reads by people, by command and from Python: their time, hours, and provenance."""

import gc
import json
import sys
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import click.testing
import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from brokers import Broker
from click.testing import CliRunner, Result
from conf_folders import write_environment, write_stream
from lakes import DDL, StreamLake, decide, new_lake
from proofs import (
    BEFORE,
    CUT,
    HOUR,
    NEXT,
    NOW,
    accept,
    event,
    job,
    new_proof,
    read,
    rebuild,
    record,
)

import anabranch
from anabranch.cli import main
from anabranch.common.errors import ConfigurationError
from anabranch.iceberg.snapshots import heads, made_at
from anabranch.offsets.hours import Timeline, hour_of, shift, start_of
from anabranch.protocol import acts, sealing, watermarks
from serving_layer.changes import start_from
from serving_layer.reader.selection import Shown, accepted_revisions, find_snapshot

OPEN = shift(HOUR, 2)
COUNT = "SELECT count(*) AS n FROM games.events"


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    """HOUR is accepted with 4 rows, NEXT sealed and read with 6, the open hour has one."""
    made = new_proof(tmp_path)
    read(made, [event(0, o, HOUR, n=o) for o in range(4)], {0: 4})
    accept(made, HOUR, BEFORE, [event(0, o, HOUR, n=o) for o in range(4)])
    days = {o: date(2026, 11, 20 + o % 2) for o in range(4, 10)}
    read(made, [event(0, o, NEXT, event_date=day) for o, day in days.items()], {0: 10})
    read(made, [event(0, 10, OPEN)], {0: 11})
    configure(made)
    return made


def configure(made: StreamLake, ddl: str = DDL) -> None:
    """Write the configuration that the lake is of."""
    write_environment(made.folder)
    write_stream(made.folder, "events", table=made.name, schema=ddl)


def ask(one: StreamLake, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["query", *arguments, "--conf", str(one.folder)])


def number(one: StreamLake, *arguments: str) -> int:
    done = ask(one, COUNT, "--output", "json", *arguments)
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)
    return int(row["n"])


def test_a_query_is_a_table_csv_json_or_parquet_or_leaves_the_file(one: StreamLake) -> None:
    sql = f"SELECT n, kafka_offset FROM {one.name} WHERE n < 2 ORDER BY n"
    table = "n  kafka_offset\n-  ------------\n0             0\n1             1\n"
    assert ask(one, sql).stdout == table
    assert ask(one, sql, "--output", "csv").stdout == "n,kafka_offset\n0,0\n1,1\n"
    rows = json.loads(ask(one, sql, "--output", "json").stdout)
    assert rows == [{"n": 0, "kafka_offset": 0}, {"n": 1, "kafka_offset": 1}]
    out = one.folder / "r.parquet"
    assert ask(one, sql, "--output", "parquet", "--out", str(out)).exit_code == 0
    assert pq.read_table(out)["n"].to_pylist() == [0, 1]
    late_out = one.folder / "r.csv"
    late_out.write_text("before")
    late = "SELECT CASE WHEN i = 300000 THEN error('late') ELSE i END FROM range(300001) t(i)"
    done = ask(one, late, "--output", "csv", "--out", str(late_out))
    assert (done.exit_code, late_out.read_text()) == (2, "before")
    assert "late" in done.output
    assert [path.name for path in one.folder.glob(".*.part")] == []
    of_hour = f"SELECT sum(n) FROM {one.name} WHERE ingest_hour = '{HOUR}'"
    done = ask(one, of_hour, "--explain", "--output", "csv")
    [table, files, all_files, size, all_size, columns] = done.stderr.splitlines()[2].split()[:6]
    assert (table, files, all_files) == ("games.events", "1", "4")
    assert int(columns) < int(size) < int(all_size)
    assert "n ingest_hour" in done.stderr and f'(ingest_hour == "{HOUR}")' in done.stderr


def test_a_terminals_table_is_not_endless(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = "SELECT i FROM range(1000) t(i)"
    assert ask(one, sql).stdout.count("\n") == 1002, "piped, it has every row"
    cut = ask(one, sql, "--limit", "3")
    assert cut.stdout.split() == ["i", "-", "0", "1", "2"]
    assert cut.stderr == "the first 3 rows; --limit 0 shows all, --out FILE writes all\n"
    assert "the first" not in ask(one, sql, "--limit", "1000").stderr
    assert ask(one, sql, "--output", "csv", "--limit", "3").stdout.count("\n") == 1001
    monkeypatch.setattr("anabranch.cli.read._SHOWN_ROWS", 5)
    monkeypatch.setattr(click.testing._NamedTextIOWrapper, "isatty", lambda stream: True)
    shown = ask(one, sql)
    assert " 4 " in shown.stdout and " 5 " not in shown.stdout
    assert "the first 5 rows" in shown.stderr
    assert " 999 " in ask(one, sql, "--limit", "0").stdout


def test_a_time_selects_the_snapshot_of_main_at_that_time(one: StreamLake) -> None:
    before = made_at(one.table().snapshot_by_id(heads(one.table())["main"]) or pytest.fail())
    while datetime.now(UTC) - before < timedelta(milliseconds=2):
        pass  # Snapshots are stamped in milliseconds.
    read(one, [event(0, 11, OPEN)], {0: 12})
    assert number(one) == 12 and number(one, "--as-of", before.isoformat()) == 11
    assert number(one, "--as-of", f"{before.replace(tzinfo=None)}") == 11
    assert number(one, "--as-of", (before - timedelta(milliseconds=1)).isoformat()) == 10


def test_a_time_of_which_a_publish_is_forgotten_names_the_tags_beside_it(one: StreamLake) -> None:
    """The hazard: before it was made, main was never what the oldest snapshot left shows."""
    table = one.table()
    first = made_at(min(table.snapshots(), key=lambda s: s.sequence_number or 0))
    rebuild(one, HOUR, BEFORE, 2, [event(0, 0, HOUR, n=9)])
    found = rf"found its publishes only since .*; name a tag.*{HOUR}-r1"
    with pytest.raises(ConfigurationError, match=found):
        find_snapshot(one.table(), (first - timedelta(seconds=1)).isoformat())
    found = "expected a tag, a branch, a snapshot's id or a time, found '20261121'"
    with pytest.raises(ConfigurationError, match=found):
        find_snapshot(table, "20261121")


def test_hours_that_were_sealed_together_are_named_by_the_tag_of_the_last(tmp_path: Path) -> None:
    """The hazard: an hour of another seal is taken for one of them: its own tag is gone."""
    first = hour_of(datetime.now(UTC) - timedelta(hours=4))
    one = new_lake(tmp_path, timeline=Timeline(first, first, {0: 0}))
    configure(one)
    read(one, [event(0, 0, first)], {0: 1})
    sealing.seal(one.publisher, Broker(log={0: [int(start_of(first).timestamp() * 1000)]}).adapter)
    last = shift(one.state().timeline.open, -1)
    assert last > shift(first, 1)
    refs = one.table().metadata.refs
    assert [name for name in refs if name.startswith("main-")] == [f"main-{last}"]
    read(one, [event(0, 1, one.state().timeline.open)], {0: 2})
    for hour in (first, shift(first, 1), last):
        assert number(one, "--as-of", f"main-{hour}") == 1
        assert anabranch.open("events", conf=one.folder, as_of=f"main-{hour}").arrow().num_rows == 1
    assert start_from(job(one), f"main-{first}") == start_from(job(one), f"main-{last}")
    before = ask(one, COUNT, "--as-of", f"main-{shift(first, -1)}")
    assert (before.exit_code, f"found 'main-{shift(first, -1)}'" in before.output) == (2, True)
    # Another seal, whose own tag is gone by now.
    record(one, decide(shift(first, 1), "sealed", 0, None, NOW, "other-seal"))
    gone = ask(one, COUNT, "--as-of", f"main-{shift(first, 1)}")
    assert (gone.exit_code, "tags expire)" in gone.output) == (2, True)


def test_only_accepted_hours(one: StreamLake) -> None:
    assert number(one, "--only-accepted") == 4
    assert number(one, "--only-accepted", "--as-of", "main") == 4
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 9)])
    assert number(one, "--only-accepted") == 9 and number(one) == 10
    acts.serve_hour(one.publisher, NEXT, "speed", "the rule is wrong")
    assert number(one, "--only-accepted") == 4, "these rows are not the accepted ones"
    assert number(one, "--only-accepted", "--as-of", "batch") == 9


def test_only_accepted_hours_are_refused_until_main_is_merged(one: StreamLake) -> None:
    before = heads(one.table())["batch"]
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 9)])
    one.set_back("batch", before)
    refused = ask(one, COUNT, "--only-accepted")
    assert (refused.exit_code, "run `anabranch merge events`" in refused.output) == (1, True)
    done = ask(one, COUNT, "--only-accepted", "--as-of", "speed")
    assert done.exit_code == 2 and "expected main or batch" in done.output


def test_a_revision_of_an_hour(one: StreamLake) -> None:
    rebuild(one, HOUR, BEFORE, 2, [event(0, o, HOUR, n=7) for o in range(2)])
    rebuild(one, HOUR, BEFORE, 3, [event(0, 0, HOUR, n=8)])
    assert [number(one, "--hour", HOUR, "--revision", str(r)) for r in (1, 2, 3)] == [4, 2, 1]
    acts.serve_hour(one.publisher, HOUR, "speed", "the rule is wrong")
    assert number(one, "--hour", HOUR, "--revision", "3") == 1
    for arguments, message in (
        (["--hour", HOUR, "--revision", "4"], "found 4 (known: 1, 2, 3)"),
        (["--hour", NEXT, "--revision", "1"], "found 1 (known: none)"),
        (["--hour", HOUR], "--hour HOUR together"),
        (["--hour", "x", "--revision", "1"], "expected a UTC hour"),
        (["--hour", HOUR, "--revision", "1", "--only-accepted"], "expected no as-of and no only-accepted"),
    ):  # fmt: skip
        done = ask(one, COUNT, *arguments)
        assert done.exit_code == 2 and message in done.output, done.output


def test_provenance_and_watermarks_are_those_of_now_or_of_a_snapshot(one: StreamLake) -> None:
    found = anabranch.open("events", conf=one.folder).provenance()
    assert [(h.hour, h.layer, h.revision, h.complete, h.rows, h.note) for h in found.hours] == [
        (HOUR, "batch", 1, True, 4, None),
        (NEXT, "speed", None, True, 6, "not accepted yet"),
        (OPEN, "speed", None, False, 1, "the hour is not sealed: more may come"),
    ]
    line = [HOUR, "batch", "1", "yes", "1", "4"]
    done = ask(one, f"{COUNT} WHERE ingest_hour = '{HOUR}'", "--provenance")
    assert line in [shown.split() for shown in done.stdout.splitlines()]
    assert NEXT not in done.stdout
    done = ask(one, COUNT, "--provenance", "--hour", HOUR, "--revision", "1", "--output", "json")
    assert json.loads(done.stdout) == [{"n": 4}]
    assert line in [shown.split() for shown in done.stderr.splitlines()]
    then = str(heads(one.table())["main"])
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 10)])
    for at, through, expected in (
        (then, HOUR, ("speed", None, "not accepted yet")), (None, NEXT, ("batch", 1, None)),
    ):  # fmt: skip
        handle = anabranch.open("events", conf=one.folder, as_of=at)
        shown = handle.provenance(hours=NEXT).hours
        assert [(h.layer, h.revision, h.note) for h in shown] == [expected]
        assert handle.watermarks() == watermarks.Watermarks(through, start_of(OPEN))


def test_an_hour_long_ago_has_the_revision_of_the_ledger(one: StreamLake) -> None:
    state = one.state()
    timeline = replace(state.timeline, sealed={NEXT: CUT})
    forgotten = replace(state, accepted={}, settled_before=NEXT, timeline=timeline)
    assert Shown(forgotten).accepted_hours() == {HOUR}
    record(one, decide(HOUR, "accepted", 5, BEFORE, NOW, served="batch", good=4))
    shown, now = Shown(forgotten), datetime.now(UTC)
    assert accepted_revisions(one.lake, one.stream, shown, [HOUR, NEXT], now) == {HOUR: 5}


def test_a_handle_reads_a_table_whose_namespace_is_a_word_of_sql(tmp_path: Path) -> None:
    made = new_lake(tmp_path, namespace="default")
    made.serve([(HOUR, 0, 0)], {0: 1})
    configure(made)
    events = anabranch.open("events", conf=made.folder)
    assert events.arrow(columns=["n"], hours=HOUR).to_pydict() == {"n": [0]}
    assert [hour.hour for hour in events.provenance().hours] == [HOUR]


def test_handles_read_rows_by_any_library(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    events = anabranch.open("events", conf=one.folder, only_accepted=True)
    relation = events.duckdb(columns=["n", "ingest_hour"])
    gc.collect()
    assert relation.filter("n >= 2").aggregate("sum(n) AS total").fetchall() == [(5,)]
    # Times are Python's.
    times = [row[0] for row in events.duckdb(columns=["kafka_timestamp"]).fetchall()]
    assert {time.utcoffset() for time in times} == {timedelta(0)}
    with duckdb.connect(":memory:") as connection:
        connection.register("rows", events.dataset())
        assert connection.sql("SELECT count(*), max(n) FROM rows").fetchall() == [(4, 3)]
    handle = anabranch.open("events", conf=one.folder)
    some = handle.arrow(columns=["n"], hours=HOUR, where="n > 1 -- and so on")
    assert some.to_pydict() == {"n": [2, 3]}
    assert handle.arrow(hours=(HOUR, NEXT)).num_rows == 10
    assert sorted(handle.pandas(columns=["n"], hours=HOUR)["n"]) == [0, 1, 2, 3]
    assert anabranch.open("events", conf=one.folder, only_accepted=True).arrow().num_rows == 4
    for rows, message in (
        ({"columns": "n"}, "expected a list of names"),
        ({"columns": ["nothing"]}, 'column "nothing" not found'),
        ({"hours": (NEXT, HOUR)}, "expected the earlier hour first"),
        ({"hours": "x"}, "expected a UTC hour"),
        ({"since": "2026-11-21"}, "ask by hours="),
    ):
        with pytest.raises(ConfigurationError, match=message):
            handle.arrow(**rows)
    with pytest.raises(AttributeError):
        _ = anabranch.nothing
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match="pip install polars"):
        anabranch.open("events", conf=one.folder).polars()


def test_polars_has_the_values_and_the_types(tmp_path: Path) -> None:
    ddl = (
        "id STRING NOT NULL, n INT, x DOUBLE, price DECIMAL(20, 2), at TIMESTAMP, day DATE, flag "
        "BOOLEAN, raw BINARY, place STRUCT<lat: DOUBLE, tags: ARRAY<STRING>>, marks MAP<STRING, "
        "BIGINT>"
    )
    made = new_lake(tmp_path, ddl=ddl)
    configure(made, ddl)
    at = datetime(2026, 11, 21, 0, 0, 0, 123456, tzinfo=UTC)
    full = {
        "id": "a", "n": 1, "x": -0.5, "price": Decimal("123456789012345678.25"), "at": at,
        "day": date(1969, 12, 31), "flag": False, "raw": b"\x00\xff",
        "place": {"lat": 48.2, "tags": ["x", None]}, "marks": {"k": 2**40},
    }  # fmt: skip
    empty = {"place": {"lat": None, "tags": []}, "marks": {}}
    nulls = dict.fromkeys(full)
    rows = [full, nulls | empty | {"id": "b"}, nulls | {"id": "c"}]
    read(made, [event(0, o) | row for o, row in enumerate(rows)], {0: 3})
    frame = anabranch.open("events", conf=tmp_path).polars(columns=list(full)).sort("id")
    assert dict(frame.schema) == {
        "id": pl.String(), "n": pl.Int32(), "x": pl.Float64(), "price": pl.Decimal(20, 2),
        "at": pl.Datetime("us", "UTC"), "day": pl.Date(), "flag": pl.Boolean(), "raw": pl.Binary(),
        "place": pl.Struct({"lat": pl.Float64(), "tags": pl.List(pl.String())}),
        "marks": pl.Map(pl.String(), pl.Int64()),
    }  # fmt: skip
    assert frame.to_dicts() == rows
