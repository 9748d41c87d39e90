"""Staged rows are published only while no program can have deleted their files."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lakes import FIRST, StreamLake, new_lake

from anabranch.common.errors import Transient
from anabranch.iceberg.clock import Clock
from anabranch.iceberg.lake import PREPARED_WITHIN
from anabranch.iceberg.snapshots import find_staged
from anabranch.iceberg.staging import NAMED_WITHIN, WITHIN, stage


class Frame:
    """Stands where Spark writes a frame: a staged snapshot of one row, after so much time."""

    def __init__(self, lake: StreamLake, takes: timedelta) -> None:
        self._lake, self._takes = lake, takes
        self._now = datetime.now(UTC)
        self._said: dict[str, str] = {}
        # Of a machine that slept: all its clocks go on.
        lake.lake.__dict__["clock"] = Clock(None, lambda: self._now, lambda: self._now.timestamp())
        self.sparkSession = SimpleNamespace(
            conf=SimpleNamespace(set=self._said.__setitem__, unset=lambda key: self._said.pop(key))
        )

    def writeTo(self, table: str) -> Any:
        writer = SimpleNamespace(append=self._append)
        writer.option = lambda *_: writer
        return writer

    def _append(self) -> None:
        self._lake.stage([(FIRST, 0, 0)], self._said["spark.wap.id"])
        self._now += self._takes


def test_files_that_took_too_long_to_stage_are_staged_again(tmp_path: Path) -> None:
    """The hazard: a process sleeps for days between writing files and the snapshot that names them,
    and orphan removal takes them meanwhile: no head moves, and what is published then lacks its
    files."""
    lake = new_lake(tmp_path)
    late: Any = Frame(lake, WITHIN + timedelta(seconds=1))
    with pytest.raises(Transient, match="orphan removal may have deleted its files"):
        stage(late, lake.lake, "lake", lake.name, "late")
    assert find_staged(lake.table(), "late") is None
    in_time: Any = Frame(lake, WITHIN)
    assert stage(in_time, lake.lake, "lake", lake.name, "in time").rows == 1


def test_it_is_noticed_before_the_youngest_orphan_is_deleted() -> None:
    from pydantic import ValidationError

    from anabranch.config import Maintain

    assert timedelta(days=1) > WITHIN
    assert timedelta(hours=1) > NAMED_WITHIN + PREPARED_WITHIN, (
        "the least age of other programs' orphan removal"
    )
    with pytest.raises(ValidationError):
        Maintain(orphans_after=timedelta(hours=23))
