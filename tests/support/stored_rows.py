"""The rows of every Parquet file of a stream, also of files without a reference from a snapshot."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from world import World

from anabranch.iceberg.files import list_table, own_files
from anabranch.iceberg.s3 import open_store
from anabranch.lifecycle.erasure.end import tables_of


def stored_rows(one: World) -> str:
    """Return the text of each row of the stream's tables, views and archive."""
    found = []
    for table in map(one.lake.load, tables_of(one.job)):
        for stored in list_table(own_files(one.lake, table)):
            if stored.path.endswith(".parquet"):
                with table.io.new_input(stored.path).open() as file:
                    found += _rows(file.read())
    return "\n".join(found)


def exported_rows(one: World, bucket: str, prefix: str) -> str:
    """Return the text of each row of the Parquet files below a prefix."""
    store = open_store(one.job.environment.s3)
    keys = [key for key, _, _ in store.list_objects(bucket, prefix) if key.endswith(".parquet")]
    return "\n".join(row for key in keys for row in _rows(store.get(bucket, key)))


def _rows(content: bytes) -> Iterator[str]:
    return map(repr, pq.read_table(pa.BufferReader(content)).to_pylist())
