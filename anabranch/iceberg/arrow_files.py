"""Write rows in memory as data files of a table, with PyIceberg's writer: no snapshot refers to
them yet."""

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
    """Write rows in the table's columns into files of their partitions, by the table's properties
    and these over them. Raises OSError."""
    metadata = table.metadata.model_copy(
        update={"properties": {**table.metadata.properties, **properties}}
    )
    files = list(write_data_files(metadata, rows, table.io))
    count_written((file.file_path, file.file_size_in_bytes) for file in files)
    for file in files:
        file.spec_id = metadata.default_spec_id
    return files
