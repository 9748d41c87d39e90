"""Partials of views of erased rows leave with the rows; no certificate overlooks them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from lakes import DDL, FIRST, new_stream
from people import ORDER, People

from anabranch.config import EventTime
from anabranch.iceberg import admin, table_schemas
from anabranch.iceberg.files import local_path
from anabranch.job import Job
from anabranch.lifecycle.erasure import run
from anabranch.lifecycle.erasure.status import read_statuses
from anabranch.lifecycle.maintenance import maintain
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import load_state
from serving_layer import views as filling
from serving_layer.views import fill, partial_hours

SCHEMA = f"{DDL}, at TIMESTAMP"
STREAM = new_stream(
    schema=SCHEMA,
    event_time=EventTime(column="at", past=timedelta(hours=2), future=timedelta(hours=1)),
    views={"names": {"window": "1 hour", "group": "id", "aggregates": {"events": "count"}}},
)
[VIEW] = STREAM.views
TABLE = STREAM.partials_table(VIEW)


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path, ddl=SCHEMA)
    schema = table_schemas.partials_schema(STREAM, VIEW)
    admin.create(people.lake.lake, TABLE, schema, ("ingest_hour",), admin.TABLE_PROPERTIES)
    admin.add_branches(people.lake.lake, TABLE, {})
    assert fill(people.lake.lake, STREAM, VIEW) == 1
    assert names(people) == ["anna", "bert", "carl"]
    return people


def job_of(people: People) -> Job:
    return replace(people.job, stream=STREAM)


def names(people: People) -> list[str]:
    """The groups of the view's partials."""
    return sorted(people.lake.lake.load(TABLE).scan().to_arrow()["by_id"].to_pylist())


def erase(people: People, until: timedelta = ORDER.until) -> None:
    run.erase(job_of(people), Publisher(people.lake.lake, STREAM), replace(ORDER, until=until))


def test_partials_of_erased_rows_leave_and_the_hour_is_filled(people: People) -> None:
    erase(people)
    assert names(people) == []
    assert fill(people.lake.lake, STREAM, VIEW) == 1
    assert names(people) == ["bert", "carl"]
    maintain(job_of(people), datetime.now(UTC))
    assert names(people) == ["bert", "carl"]


def test_a_fill_of_rows_from_before_an_erasure_withholds_the_certificate(people: People) -> None:
    """The hazard: a fill computes an hour, an erasure removes rows of it, the fill commits."""
    lake = people.lake.lake
    state = load_state(lake, STREAM.table)
    hours = partial_hours(lake, STREAM, VIEW, state)
    computed = filling.compute(STREAM, VIEW, state, hours, (FIRST,))
    erase(people, timedelta(0))
    assert filling._replace(lake, STREAM, VIEW, replace(hours, partials=lake.load(TABLE)), computed)
    assert "anna" in names(people)

    later = datetime.now(UTC) + timedelta(days=3)
    [status] = read_statuses(job_of(people), later)
    [why] = [line for line in status.left if "partials" in line]
    found = "view names has partials of 1 hours that were computed from former rows, "
    assert why.startswith(f"{found}{FIRST} is the")
    maintain(job_of(people), later)
    assert names(people) == []
    maintain(job_of(people), later + timedelta(days=2))
    [status] = read_statuses(job_of(people), later + timedelta(days=2))
    assert status.left == [] and status.is_certificate
    files = local_path(lake.load(TABLE).location()).rglob("*.parquet")
    assert not [path for path in files if b"anna" in path.read_bytes()]


def test_the_table_of_a_removed_view_withholds_the_certificate(people: People) -> None:
    """The hazard: no file of a stream names it, so nothing removes its partials."""
    run.erase(people.job, Publisher(people.lake.lake, people.lake.stream), ORDER)
    lake, other = people.lake.lake, f"{STREAM.table}_names"  # has the name of the view
    for name in (other, f"{other}_hours", f"{other}_names_partials"):
        admin.create(lake, name, lake.load(TABLE).schema(), (), admin.TABLE_PROPERTIES)
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert [line for line in status.left if "removed view" in line] == [
        f"table {TABLE} of a removed view may have the values: drop it, with its files"
    ]
