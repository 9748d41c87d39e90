"""How far a query has read its files is followed, and changes nothing of what it reads."""

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from anabranch.common.logs import Progress
from serving_layer.query.datasets import FollowedScan

FILES, ROWS = 4, 1000


@pytest.fixture
def files(tmp_path: Path) -> ds.Dataset:
    """Each of `FILES` holds `ROWS` rows, in two row groups."""
    for number in range(FILES):
        rows = pa.table({"file": [number] * ROWS, "n": range(ROWS)})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=ROWS // 2)
    return ds.dataset(tmp_path)


def test_a_file_is_done_when_the_next_one_begins(files: ds.Dataset) -> None:
    """test_query_pruning.py has conditions."""
    progress = Progress(logging.getLogger(), "query", "files")
    followed = FollowedScan(files.scanner(), FILES, progress)
    seen = [(batch["file"][0].as_py(), progress._done) for batch in followed.to_reader()]
    assert seen == [(number, number) for number in range(FILES) for _ in range(2)]
    assert progress._done == FILES
