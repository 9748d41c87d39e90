"""Files that storage lacks are found in any layout of folders, and no file that is there."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from anabranch.common.errors import NotOffered
from anabranch.iceberg import files
from anabranch.iceberg.files import missing_paths


@pytest.mark.parametrize(
    "folder",
    [
        "data/ingest_hour=2026-11-21T{i:02}",
        "data/{i:04b}/{i:03}/region=eu/ingest_hour=2026-11-21T10",
        "{i:03}/data/event_date=2026-11-21",
    ],
    ids=["by hour", "by hash first", "other roots"],
)
@pytest.mark.parametrize("folders", [3, 60])
@pytest.mark.parametrize("lists", [True, False], ids=["listed", "a table bucket"])
def test_only_files_that_storage_lacks_are_missing(
    tmp_path: Path, folder: str, folders: int, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotOffered("expected an object store that lists and deletes")

    if not lists:
        monkeypatch.setattr(files, "list_files", refuse)
    paths = [tmp_path / folder.format(i=i) / "rows.parquet" for i in range(folders)]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    lost = paths[1]
    lost.unlink()
    found = missing_paths(PyArrowFileIO(), [f"file://{path}" for path in paths])
    assert found == {f"file://{lost}"}


def test_an_object_for_a_folder_is_no_file_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"": 0, "day=1_$folder$": 0, "day=1/": 0, "day=1/a.parquet": 7, "day=1/b.parquet": 0}
    sizes["rows/"] = 7
    at = datetime.now(UTC)
    stored = [files.Stored(f"s3://bucket/old/{name}", size, at) for name, size in sizes.items()]
    monkeypatch.setattr(files, "list_files", lambda *_: iter(stored))
    found = files.files_by_name(PyArrowFileIO(), "s3://bucket/old")
    assert [*found] == ["day=1/a.parquet", "day=1/b.parquet", "rows/"]
