"""The account of a topic's newest records: rows, dead letters, duplicates and the objections."""

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from anabranch.cli import report
from anabranch.cli.render.rows import check_text
from anabranch.config.schema import parse_schema
from anabranch.config.stream import Stream
from anabranch.decode import Decoder, decode_spec, inputs
from anabranch.operations.check import Check, batch_of, check_of

NOW = datetime(2026, 11, 28, 10, 30, tzinfo=UTC)
AT = int(NOW.timestamp() * 1000)


def record(offset: int, value: object, **more: Any) -> Any:
    """A record as kafka-python has it."""
    data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    plain = {"partition": 0, "offset": offset, "timestamp": AT, "key": None, "headers": []}
    return SimpleNamespace(**plain | {"value": data} | more)


def checked(records: list[Any], schema: str, **stream: Any) -> Check:
    of = Stream.model_validate(
        {
            "name": "orders", "topic": "shop.orders", "table": "shop.orders", "key": ["id"],
            "schema": schema, "columns": parse_schema(schema),
        }
        | stream
    )  # fmt: skip
    batch = batch_of(records, NOW)
    return check_of(of, batch, Decoder(decode_spec(of, lists_unknown=True)).decode(batch))


def test_good_records_have_no_objection() -> None:
    found = checked([record(i, {"id": f"o-{i}"}) for i in range(7)], "id STRING NOT NULL")
    assert (found.records, found.good, found.dead, found.duplicates) == (7, 7, 0, 0)
    assert found.rows == [{"id": f"o-{i}"} for i in range(5)]
    assert (found.reasons, found.objections) == ([], [])
    [table, *_] = [one for one in check_text(found) if isinstance(one, report.Table)]
    assert [*table.rows][:2] == [("good", 7, "100 %"), ("dead letters", 0, "0 %")]
    none = checked([], "id STRING")
    assert [*check_text(none)] == ["topic shop.orders has no records to check"]
    assert none.objections == []


def test_reasons_are_counted_without_the_value_and_shown_with_the_first_one() -> None:
    times = [record(i, {"id": "a", "ts": 1795867200123 + i}) for i in range(3)]
    found = checked([*times, record(3, b"{"), record(4, None)], "id STRING, ts TIMESTAMP")
    assert [(r.records, r.code, r.offset) for r in found.reasons] == [
        (3, "wrong_type", 0), (1, "malformed_json", 3), (1, "null_value", 4),
    ]  # fmt: skip
    found_it = "ts: expected timestamp, found 1795867200123"
    many = "dead letters: expected at most 5 % of 5 records, found 5 (100 %)"
    assert found.objections == [f"{many}; most often {found_it}"]
    lines = [line for line in check_text(found) if isinstance(line, str)]
    assert f"3 of 5 would be dead letters: {found_it} (wrong_type; partition 0, offset 0)" in lines


def test_even_one_dead_letter_of_few_is_more_than_the_share() -> None:
    records = [record(0, {"id": "a"}), record(1, {})]
    assert checked(records, "id STRING NOT NULL").objections
    assert not checked(records, "id STRING NOT NULL", quality={"max_dead": "50 %"}).objections


def test_duplicates_are_those_of_the_batch_layer() -> None:
    records = [
        record(0, {"id": "a", "n": 1}),
        record(1, {"id": "a", "n": 1}),
        record(2, {"id": "a", "n": 2}),
        # A key of nulls and empty texts names no event.
        record(3, {"id": "", "n": 1}),
        record(4, {"n": 1}),
        record(5, {"id": "b", "n": 1}, partition=1),
    ]
    found = checked(records, "id STRING, n INT")
    assert (found.good, found.duplicates, found.conflicts) == (4, 2, 1)
    assert found.objections == [
        "duplicates by id with other content: expected at most 1 % of 6 records, found 1 (16.7 %); "
        "the first: partition 0, offset 2, has the key of partition 0, offset 0; correct `key`, "
        "or accept that they are dropped"
    ]
    assert checked(records, "id STRING, n INT", key="none").good == 6
    # The kept row of an event is that of the smallest offset.
    records = [
        record(9, {"id": "a", "n": 1}, timestamp=AT - 5000),
        record(2, {"id": "a", "n": 2}),
        record(10, {"id": "a", "n": 2}, timestamp=AT + 1),
    ]
    found = checked(records, "id STRING, n INT")
    assert (found.duplicates, found.conflicts) == (2, 1)


def test_columns_that_no_record_fills_are_named_with_the_field_that_was_meant() -> None:
    """The hazard: every record is a row, and the rows have nothing."""
    sent = [record(i, {"OrderId": f"o-{i}", "total": i, "colour": "x"}) for i in range(3)]
    found = checked(sent, "id STRING, order_id STRING, total INT, note STRING, color STRING")
    assert (found.good, found.objections) == (3, [
        "column order_id: expected field order_id, found OrderId; correct the name, or write `from: OrderId`",
        "column color: expected field color, found colour; correct the name, or write `from: colour`",
        "key: expected a value of id, found none; no duplicates would be found",
    ])  # fmt: skip
    # Debezium's changes without `format.envelope`.
    change = record(0, {"op": "c", "before": None, "after": {"n": 1, "z": 1}})
    [objection] = checked([change], "op STRING, n INT, m INT", key="none").objections
    expected = (
        "columns n, m: expected values, found none, and fields without a column: after, before"
    )
    assert objection.startswith(expected)
    # One record with the field is enough.
    sent.append(record(3, {"id": "a", "order_id": "b"}))
    assert checked(sent, "id STRING, order_id STRING, total INT").objections == []


def test_a_unit_that_is_too_small_for_all_times_is_named() -> None:
    """The hazard: every event is in January 1970, in partitions of that month."""
    schema = {"id": "STRING", "at": {"type": "TIMESTAMP", "unit": "millis"}}
    seconds, columns = AT // 1000, parse_schema(schema)
    sent = [record(i, {"id": f"o-{i}", "at": seconds + i}) for i in range(3)]
    found = checked(sent, "id STRING, at TIMESTAMP", columns=columns)
    assert found.objections == [
        "column at: expected times of these years, found 1970-01-21 18:51:01 as the latest; "
        "correct `unit: millis`"
    ]
    sent.append(record(3, {"id": "a", "at": AT}))
    assert checked(sent, "id STRING, at TIMESTAMP", columns=columns).objections == []


def test_a_record_is_in_the_hour_of_its_timestamp() -> None:
    stamps = [AT - 3_600_000, -1, 2**62]
    batch = batch_of([record(i, {}, timestamp=ms) for i, ms in enumerate(stamps)], NOW)
    rows = batch.select(["offset", "ingest_hour"]).to_pylist()
    by_offset = {row["offset"]: row["ingest_hour"] for row in rows}
    assert by_offset == {0: "2026-11-28T09", 1: "2026-11-28T10", 2: "2026-11-28T10"}
    # As Spark reads them: -1 is a time.
    assert batch.column("timestamp").null_count == 1
    # Headers arrive as Kafka has them.
    headers = [("trace", b"\xff"), ("é", None)]
    batch = batch_of([record(0, {}, headers=headers), record(1, {})], NOW)
    of_first = [{"key": "trace", "value": b"\xff"}, {"key": "é", "value": None}]
    assert inputs.headers_of(batch.column("headers")).to_pylist() == [of_first, None]
