"""Loading a table whose metadata file goes while it is read: publishes of others delete what falls
out of their log."""

from pathlib import Path
from typing import Any

import pytest
from lakes import new_lake
from pyiceberg.serializers import FromInputFile

from anabranch.common.errors import MetadataGone
from anabranch.iceberg.admin import TABLE_PROPERTIES

KEPT = int(TABLE_PROPERTIES["write.metadata.previous-versions-max"])


def test_a_metadata_file_that_publishes_of_others_deleted_meanwhile_is_no_lost_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, real, read = new_lake(tmp_path), FromInputFile.table_metadata, list[Path]()

    def paused(file: Any, *given: Any) -> Any:
        """Between the catalog's answer and the reading of the file that it names, others
        publish."""
        read.append(Path(file.location.removeprefix("file://")))
        if len(read) == 1:
            for _ in range(KEPT + 2):
                lake.move("speed")
            assert not read[0].exists(), "the hazard did not happen"
        return real(file, *given)

    monkeypatch.setattr(FromInputFile, "table_metadata", paused)
    assert lake.table().metadata_location.removeprefix("file://") == str(read[-1])


def test_a_file_counts_as_missing_only_if_the_catalog_names_it_twice(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    Path(lake.table().metadata_location.removeprefix("file://")).unlink()
    with pytest.raises(MetadataGone, match="--register"):
        lake.table()
