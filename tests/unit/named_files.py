"""Data files that are only named: commits of thousands of files need none of their bytes."""

import uuid
from datetime import date, timedelta

from lakes import StreamLake
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record

from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import start_of
from anabranch.protocol.publish import new_id

ROWS = 1000
_EPOCH = date(1970, 1, 1)


def named_files(lake: StreamLake, hour: str, count: int, dates: int = 1) -> tuple[DataFile, ...]:
    """`count` files of an hour for each of so many event dates, with statistics like Spark's."""
    location, days = lake.table().location(), [*range(dates)] * count
    newest = start_of(hour).date()
    return tuple(named_file(location, hour, newest - timedelta(days=back)) for back in sorted(days))


def named_file(
    location: str, hour: str, day: date, bounds_of_view: dict[int, bytes] | None = None
) -> DataFile:
    """A file of an hour and date below a table's location; or a view's partials of the hour."""
    days = (day - _EPOCH).days
    small, large = (1).to_bytes(4, "little"), (1).to_bytes(8, "little")
    bounds = {1: b"0123456789abcdef", 2: small, 3: small, 4: large, 5: large, 6: hour.encode()}
    bounds[7] = days.to_bytes(4, "little", signed=True)
    bounds = bounds_of_view or bounds
    made = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{location}/data/event_date={day}/ingest_hour={hour}/{uuid.uuid4().hex}-00001.parquet",
        file_format=FileFormat.PARQUET,
        partition=Record(hour) if bounds_of_view else Record(days, hour), record_count=ROWS,
        file_size_in_bytes=ROWS * 60, column_sizes=dict.fromkeys(range(1, 8), 1000),
        value_counts=dict.fromkeys(range(1, 8), ROWS),
        null_value_counts=dict.fromkeys(range(1, 8), 0), nan_value_counts={},
        lower_bounds=dict(bounds), upper_bounds=dict(bounds), key_metadata=None, split_offsets=[4],
        equality_ids=None, sort_order_id=None,
    )  # fmt: skip
    made.spec_id = 0
    return made


def publish_files(lake: StreamLake, hour: str, files: tuple[DataFile, ...]) -> None:
    """A micro-batch of the speed layer: files to `speed` and `main` in one commit."""
    table = lake.table()
    changes = (Change("speed", files), Change("main", files))
    assert lake.lake.commit(table, Commit(new_id(), heads(table), changes)) is Outcome.LANDED
