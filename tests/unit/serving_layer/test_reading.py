"""How far a query has read its files is followed, and changes nothing of what it reads."""

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from anabranch.common.logs import Progress
from serving_layer.query import reading as module
from serving_layer.query.reading import QueryProgress

FILES, ROWS = 4, 1000


@pytest.fixture
def files(tmp_path: Path) -> ds.Dataset:
    """Each of `FILES` holds `ROWS` rows, in two row groups."""
    for number in range(FILES):
        rows = pa.table({"file": [number] * ROWS, "n": range(ROWS)})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=ROWS // 2)
    return ds.dataset(tmp_path)


def test_a_file_is_done_when_the_next_one_begins(files: ds.Dataset) -> None:
    followed = QueryProgress().follow(files.scanner(), FILES)
    seen = [(batch["file"][0].as_py(), followed.done) for batch in followed.to_reader()]
    assert seen == [(number, number) for number in range(FILES) for _ in range(2)]
    assert followed.done == FILES


def test_a_condition_selects_the_rows_that_the_scanner_selects(files: ds.Dataset) -> None:
    condition = (ds.field("file") == 2) & (ds.field("n") < 3)
    followed = QueryProgress().follow(files.scanner(columns=["n"], filter=condition), FILES)
    assert followed.to_reader().read_all().to_pydict() == {"n": [0, 1, 2]}
    assert followed.projected_schema.names == ["n"]
    assert followed.done == FILES


def test_progress_counts_all_rows_read(files: ds.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    complete = threading.Event()

    def report(self: Progress, units: int = 1) -> None:
        step(self, units)
        reported.append(self.line())
        if f"{2 * FILES} of {2 * FILES} files" in reported[-1]:
            complete.set()

    step = Progress.step
    monkeypatch.setattr(Progress, "step", report)
    monkeypatch.setattr(module, "_UPDATE_SECONDS", 0.01)
    reading = QueryProgress()
    with reading.show_progress("query"):
        for _ in range(2):
            reading.follow(files.scanner(), FILES).to_reader().read_all()
        assert complete.wait(20), reported[-1:]
    assert reported[-1].startswith("query: ")
