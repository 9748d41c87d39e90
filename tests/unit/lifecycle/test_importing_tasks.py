"""An import in tasks as executors get them: each task and each result is pickled."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from lakes import FIRST, StreamLake
from pyspark import cloudpickle
from test_importing import OLDEST, ids, job_of, stream_that_reads, to_json_lines, write

from anabranch.common.errors import Refused
from anabranch.lifecycle.importing import run
from anabranch.lifecycle.importing.tasks import Workers, outcome
from anabranch.offsets.hours import shift
from anabranch.protocol.publisher import Publisher


def pickled(task: Callable[[int], Any], number: int) -> Iterator[Any]:
    for i in range(number):
        data = cloudpickle.dumps(partial(outcome, task, i))  # type: ignore[no-untyped-call]
        result = pickle.loads(pickle.dumps(pickle.loads(data)()))
        if isinstance(result, Exception):
            raise result
        yield result


def make(lake: StreamLake, form: str, rows: pa.Table) -> str:
    """Write rows in a format; return the source."""
    folder = lake.folder / "source"
    folder.mkdir(exist_ok=True)
    if form == "delta":
        write_deltalake(str(folder), rows, partition_by=["n"])
    elif form == "iceberg":
        lake.lake.catalog.create_namespace("old")
        lake.lake.catalog.create_table("old.events", rows.schema).append(rows)
        return "old.events"
    elif form == "orc":
        orc.write_table(rows, str(folder / "a.orc"))
    elif form == "csv":
        times = pc.strftime(rows["timestamp"], "%Y-%m-%dT%H:%M:%SZ")
        pa_csv.write_csv(rows.set_column(2, "timestamp", times), str(folder / "a.csv"))
    else:
        nanos = rows["timestamp"].cast(pa.timestamp("ns", "UTC"))
        pq.write_table(rows.set_column(2, "timestamp", nanos), folder / "a.parquet")
        if form == "json":
            pq.write_table(rows, folder / "a.parquet")
            to_json_lines(folder / "a.parquet")
    return str(folder)


@pytest.mark.parametrize("form", ["parquet", "orc", "json", "csv", "delta", "iceberg"])
def test_rows_of_each_format_are_imported_once(tmp_path: Path, form: str) -> None:
    lake = stream_that_reads(tmp_path)
    path = tmp_path / "rows.parquet"
    write(path, [("a", 1, OLDEST, 5), ("b", 2, OLDEST, 6), ("a", 3, shift(OLDEST, 1), 0)])
    job = job_of(tmp_path)
    request = run.ImportRequest(make(lake, form, pq.read_table(path)), OLDEST)
    done = run.run(job, Publisher(job.lake, job.stream), request, Workers(2, pickled))
    assert (done.good, done.duplicate) == (2, 1)
    # Files have random names, and are read in the order of their names.
    found = {hour: sorted(of) for hour, of in ids(lake, "main").items()}
    assert found == {OLDEST: ["a", "b"], FIRST: ["0-0", "0-1"]}
    # An error keeps its type and its words.
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(Refused, match=r"a\.parquet: expected a complete Parquet file"):
        bad = run.ImportRequest(f"{tmp_path}/bad", shift(OLDEST, -1))
        run.plan(job, bad, Workers(2, pickled))
