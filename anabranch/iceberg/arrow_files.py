"""PyIceberg's writer of in-memory rows as data files that no snapshot refers to yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.manifest import DataFile

from anabranch.iceberg.file_io import count_written
from anabranch.iceberg.private_api import write_data_files

if TYPE_CHECKING:
    from pyiceberg.table import Table


def write_files(table: Table, rows: pa.Table, properties: Mapping[str, str]) -> list[DataFile]:
    """Write rows with the table's columns into files of their partitions. `properties` override the
    table's properties. Raises OSError."""
    metadata = table.metadata.model_copy(
        update={"properties": {**table.metadata.properties, **properties}}
    )
    files = list(write_data_files(metadata, rows, table.io))
    count_written((file.file_path, file.file_size_in_bytes) for file in files)
    for file in files:
        file.spec_id = metadata.default_spec_id
    return files
