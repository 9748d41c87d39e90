"""Topics as companies have them, each with values and what the row of a drafted stream has of them."""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

DEAD = None
"""The expectation of a record that no draft makes a row."""

Expected = dict[str, Any] | None
COUNT = 120
FIRST = datetime(2026, 11, 28, 10, tzinfo=UTC)


@dataclass(frozen=True)
class Sent:
    """One record, and columns of its row."""

    value: bytes | None
    expected: Expected
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _at(i: int) -> datetime:
    return FIRST + timedelta(seconds=i)


def _millis(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def webhooks(i: int) -> Sent:
    sender, bug = {"id": i, "login": f"u{i}", "site-admin": False}, {"name": "bug", "color": None}
    body = {"action": "opened", "sender": sender, "labels": [bug] * (i % 3)}
    body["note"] = None if i % 2 else "x"
    event = {"event_id": f"e-{i}", "user-agent": "hook/1", "body": body, "late": None}
    if i == COUNT - 1:
        event["late"] = {"any": [1, "x"]}
    return Sent(_json(event), {"event_id": f"e-{i}", "user_agent": "hook/1"})


def nginx_plus(i: int) -> Sent:
    responses = {"1xx": 0, "2xx": i, "5xx": i % 2}
    status = {"timestamp": _millis(_at(i)), "zones": {"a.b": {"responses": responses}}}
    return Sent(_json(status), {"timestamp": _at(i), "zones": {"a.b": {"responses": responses}}})


def access_log() -> Iterator[Sent]:
    for i in range(COUNT):
        stamp = _at(i).strftime("%d/%b/%Y:%H:%M:%S +0000")
        line = f'10.0.0.{i} - - [{stamp}] "GET /a?q={i} HTTP/1.1" 200 {i} "-" "Mozilla/5.0 (X11; a, b)"'
        expected = {"line": line, "ts": _at(i), "path": f"/a?q={i}", "status": 200, "bytes": i}
        yield Sent(line.encode(), expected)
    yield Sent(b"\xe2\x80\x9cbroken", {"line": "\u201cbroken", "ts": None, "status": None})


def syslog(i: int) -> Sent:
    line = f"<34>1 {_at(i):%Y-%m-%dT%H:%M:%S}.{i:03}Z web-{i % 2} nginx {i} ID47 - a, b"
    at = _at(i).replace(microsecond=i * 1000)
    return Sent(line.encode(), {"line": line, "ts": at, "host": f"web-{i % 2}", "app": "nginx"})


def application_log(i: int) -> Sent:
    line = f"{_at(i):%Y-%m-%d %H:%M:%S},{i:03} +0100 INFO app - user {i} did, something"
    at = _at(i).replace(microsecond=i * 1000) - timedelta(hours=1)
    return Sent(line.encode(), {"line": line, "ts": at})


def payments(i: int) -> Sent:
    charge = {"id": f"ch_{i}", "amount": i, "metadata": {"order-id": f"{i}"}}
    event = {
        "id": f"evt_{i}",
        "api_version": "2026-01-01" if i < COUNT - 1 else "2026-11-28.acacia",
        "created": round(_at(i).timestamp()),
        "user_id": i,
        "data": {"object": charge},
    }
    expected = event | {"created": _at(i), "data": {"object": charge}}
    return Sent(_json(event), expected)


def zips(i: int) -> Sent:
    line = f'"{501 + i:05}","+40.{i:06}","W. H. ""Bud""",NY'
    expected = {"c1": f"{501 + i:05}", "c2": f"+40.{i:06}", "c3": 'W. H. "Bud"', "c4": "NY"}
    return Sent(line.encode(), expected)


def airports() -> Iterator[Sent]:
    yield Sent(b"iata,name,latitude,opened", DEAD)
    for i in range(COUNT):
        expected = {"iata": f"A{i}", "name": "Field, North", "latitude": i + 0.5}
        expected |= {"opened": date(2001, 1, 2)}
        yield Sent(f'A{i},"Field, North",{i}.5,2001-01-02\n'.encode(), expected)


def quakes() -> Iterator[Sent]:
    yield Sent(b"DateTime,Depth,EventID", DEAD)
    for i in range(COUNT):
        at = _at(i).replace(microsecond=910_000)
        line = f"{at:%Y/%m/%d %H:%M:%S}.91,{i}.10,{'' if i % 3 else i}"
        expected = {"DateTime": at, "Depth": i + 0.1, "EventID": None if i % 3 else i}
        yield Sent(line.encode(), expected)


def german() -> Iterator[Sent]:
    yield Sent("Nr;Datum;Betrag;Währung".encode(), DEAD)
    for i in range(COUNT):
        expected = {"Nr": i, "Datum": _at(i).date(), "Betrag": Decimal(f"-{i}.50")}
        expected["Wahrung"] = "EUR"
        yield Sent(f'{i};28.11.2026;"-{i},50";EUR'.encode(), expected)


def readings(i: int) -> Sent:
    at = _at(i).replace(microsecond=250_000)
    reading = {"sensor": i % 5, "time": at.timestamp(), "value": None if i % 2 else i / 8}
    return Sent(_json(reading), {"time": at, "value": reading["value"]})


def dirty() -> Iterator[Sent]:
    for i in range(COUNT):
        form = ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S+00:00")[i % 3]
        event = {"id": str(i), "seen": _at(i).strftime(form), "n": i if i % 4 else str(i)}
        yield Sent(_json(event), {"id": str(i), "seen": _at(i), "n": str(i)})
    for broken in (b"{", b"\xff", b"[1]", None):
        yield Sent(broken, DEAD, b"key")


def cloud_events(i: int) -> Sent:
    event = {"specversion": "1.0", "id": str(i), "source": "/s", "type": "t"}
    event["time"] = f"{_at(i):%Y-%m-%dT%H:%M:%S}.123456789Z"
    data = {"n": i, "tags": ["a"]}
    at = _at(i).replace(microsecond=123_456)
    expected = {"id": str(i), "time": at, "n": i, "tags": ["a"]}
    return Sent(_json({**event, "data": data}), expected)


def cloud_headers(i: int) -> Sent:
    headers = (("ce_id", b"%d" % i), ("ce_source", b"/s"), ("ce_specversion", b"1.0"))
    return Sent(_json({"n": i}), {"n": i, "ce_id": str(i), "ce_source": "/s"}, headers=headers)


def otlp(i: int) -> Sent:
    nanos = str(_millis(_at(i)) * 1_000_000 + 1)
    value = {"intValue": str(i)} if i % 2 else {"stringValue": "x"}
    log = {"timeUnixNano": nanos, "severityNumber": 9}
    log["attributes"] = [{"key": "k", "value": value}]
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [log, log]}]}]}
    found = {"timeUnixNano": _at(i), "severityNumber": 9}
    found["attributes"] = {"k": {"intValue": None, "stringValue": None} | value}
    return Sent(_json(logs), {"resourceLogs": [{"scopeLogs": [{"logRecords": [found, found]}]}]})


def big_ids(i: int) -> Sent:
    id = 2**64 - 1 - i
    expected = {"id": Decimal(id), "price": Decimal("12345678901234567.89")}
    return Sent(b'{"id":%d,"price":12345678901234567.89}' % id, expected)


def metrics(i: int) -> Sent:
    metric = {"name": "cpu", "tags": {"host": f"h{i % 3}"}, "value": i / 2}
    return Sent(_json(metric | {"ts": _millis(_at(i))}), metric | {"ts": _at(i)})


def nested(i: int) -> Sent:
    lines = [{"sku": "a", "price": "1.50", "at": "2026-11-28"}]
    order = {"order_id": i, "matrix": [[i, 1], []], "lines": lines}
    line = {"sku": "a", "price": Decimal("1.50"), "at": date(2026, 11, 28)}
    return Sent(_json(order), {"order_id": i, "matrix": [[i, 1], []], "lines": [line]})


_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_FIELDS: list[dict[str, Any]] = [
    {"type": "int64", "field": "id"},
    {"type": "bytes", "field": "total", "name": _DECIMAL, "parameters": {"scale": "2", "connect.decimal.precision": "12"}},
    {"type": "int64", "field": "made_at", "name": "io.debezium.time.MicroTimestamp"},
    {"type": "int32", "field": "day", "name": "io.debezium.time.Date"},
]  # fmt: skip


def _row(i: int) -> tuple[dict[str, Any], dict[str, Any]]:
    total = base64.b64encode((100 * i).to_bytes(4, "big", signed=True)).decode()
    row = {"id": i, "total": total, "made_at": _millis(_at(i)) * 1000 + 7, "day": 20785}
    made = _at(i).replace(microsecond=7)
    return row, {"id": i, "total": Decimal(f"{i}.00"), "made_at": made, "day": date(2026, 11, 28)}


def connect(i: int) -> Sent:
    row, expected = _row(i)
    schema = {"type": "struct", "fields": _FIELDS}
    return Sent(_json({"schema": schema, "payload": row}), expected)


def _changes(with_schema: bool) -> Iterator[Sent]:
    part = {"type": "struct", "fields": _FIELDS, "optional": True}
    schema = {"type": "struct", "fields": [part | {"field": "before"}, part | {"field": "after"}]}
    for n in range(COUNT):
        i, op = n // 3, "cud"[n % 3]
        row, expected = _row(i)
        change = {
            "before": row if op in "ud" else None, "after": row if op in "cu" else None, "op": op,
            "source": {"lsn": n, "ts_ms": _millis(_at(n))}, "ts_ms": _millis(_at(n)) + 5,
        }  # fmt: skip
        if not with_schema:
            # Only a schema shows that these are an amount and a day.
            expected |= {"total": row["total"], "day": 20785}
        key = _json({"schema": {}, "payload": {"id": i}} if with_schema else {"id": i})
        value = _json({"schema": schema, "payload": change} if with_schema else change)
        yield Sent(value, expected | {"op": op, "source_lsn": n, "source_ts": _at(n)}, key)
        if op == "d" and not with_schema:
            nothing = dict.fromkeys((*expected, "op", "source_lsn", "source_ts"))
            yield Sent(None, nothing | {"id": i}, key)


def changes() -> Iterator[Sent]:
    return _changes(False)


def changes_with_schema() -> Iterator[Sent]:
    return _changes(True)


def documents() -> Iterator[Sent]:
    for i in range(COUNT):
        id, source = {"$oid": f"{i:024x}"}, {"ts_ms": _millis(_at(i)), "ord": i}
        key = _json({"id": json.dumps(id)})
        if i % 4:
            document = json.dumps({"_id": id, "n": i, "at": {"$date": _millis(_at(i))}})
            change = {"after": document, "before": None, "op": "c", "source": source}
            yield Sent(_json(change), {"_id": id["$oid"], "n": i, "at": _at(i), "op": "c"}, key)
        else:
            change = {"after": None, "before": None, "op": "d", "source": source}
            yield Sent(_json(change), {"id": json.dumps(id), "n": None, "op": "d"}, key)


def mysql(i: int) -> Sent:
    row = {"id": i, "price": "1.50", "created": f"{_at(i):%Y-%m-%dT%H:%M:%S}Z"}
    source = {"file": "binlog.000001", "pos": 100 * i, "row": 0, "ts_ms": _millis(_at(i))}
    change = {"before": None, "after": row, "op": "c", "source": source, "ts_ms": 1}
    expected = {"id": i, "price": Decimal("1.50"), "created": _at(i), "source_pos": 100 * i}
    return Sent(_json(change), expected, _json({"id": i}))


_ONE_BY_ONE: tuple[Callable[[int], Sent], ...] = (
    webhooks, nginx_plus, syslog, application_log, payments, zips, readings, cloud_events,
    cloud_headers, otlp, big_ids, metrics, nested, connect, mysql,
)  # fmt: skip
_WHOLE = (access_log, airports, quakes, german, dirty, changes, changes_with_schema, documents)
TOPICS: dict[str, Callable[[], Iterator[Sent]]] = {
    **{make.__name__: partial(map, make, range(COUNT)) for make in _ONE_BY_ONE},
    **{make.__name__: make for make in _WHOLE},
}
"""The function that yields the records of a topic, by name."""


def without_maps(value: Any) -> Any:
    """Return a value of any reader with maps as dicts: lists of pairs, or of keys and values."""
    if isinstance(value, dict):
        return {name: without_maps(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(one, tuple) for one in value):
        return {key: without_maps(one) for key, one in value}
    if value and all(isinstance(one, dict) and one.keys() == {"key", "value"} for one in value):
        return {one["key"]: without_maps(one["value"]) for one in value}
    return [without_maps(one) for one in value]
