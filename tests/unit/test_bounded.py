"""Folders that others only add to are kept within bounds, and what killed processes left goes; nothing else does."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from lakes import new_environment

from anabranch.config import Catalog, Environment, Kafka
from anabranch.config.bounded import BoundedFolder
from anabranch.errors import Transient
from anabranch.protocol.maintained import Size
from anabranch.table.files import Stored, delete_files
from anabranch.temporary import clear_abandoned, temporary_folder
from serving_layer.bounded import Bounds, bound_folder

NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)


def write(path: Path, days: float, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    at = (NOW - timedelta(days=days)).timestamp()
    os.utime(path, (at, at))
    return path


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Logs as Airflow lays them out, of ours and of another DAG, with its link to the newest."""
    folder = tmp_path / "logs"
    for day in range(1, 8):
        write(folder / f"dag_id=anabranch_hourly__events/run_id=2026-11-{21 - day}T00:00+00:00/attempt=1.log", day)
        write(folder / f"dag_id=other/run_id={day}/attempt=1.log", day)
    outside = write(tmp_path / "outside" / "precious.txt", 900)
    (folder / "dag_id=anabranch_linked").symlink_to(outside.parent)
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    first, last = write(tmp_path / "a", 9), write(tmp_path / "z", 9)
    held = write(tmp_path / "held" / "x", 9).parent  # unlink refuses a folder, whoever asks
    with pytest.raises(Transient, match=f"delete 3 files: expected the right to, found 1 left, first file://{held}: "):
        delete_files(new_environment(tmp_path), [f"file://{path}" for path in (first, held, last)])
    assert held.exists() and not first.exists() and not last.exists()


@pytest.mark.parametrize(
    ("bounds", "left", "others"),
    [
        ({"after": timedelta(days=3)}, 3, 3),
        ({"most": 4}, 2, 2),
        ({"after": timedelta(days=5), "files": "dag_id=anabranch_*"}, 5, 7),
        ({"most": 2, "files": "dag_id=anabranch_*"}, 2, 7),
        ({"files": "*.txt", "most": 1}, 7, 7),
    ],
    ids=["age", "number", "age of some", "number of some", "none of them"],
)
def test_what_is_beyond_its_bounds_goes_the_oldest_first(
    logs: Path, bounds: dict[str, Any], left: int, others: int
) -> None:
    folder, environment = BoundedFolder(folder=str(logs), **bounds), new_environment(logs.parent)
    before = names(logs)
    planned = bound_folder(environment, folder, NOW, dry_run=True)
    assert names(logs) == before
    done = bound_folder(environment, folder, NOW, dry_run=False)
    assert (done.gone, done.left) == (planned.gone, planned.left)
    ours = {f"dag_id=anabranch_hourly__events/run_id=2026-11-{20 - i}T00:00+00:00/attempt=1.log" for i in range(left)}
    assert names(logs) == ours | {f"dag_id=other/run_id={i + 1}/attempt=1.log" for i in range(others)}
    assert done.gone == Size(14 - left - others, 10 * (14 - left - others))
    assert (logs.parent / "outside" / "precious.txt").exists() and (logs / "dag_id=anabranch_linked").is_symlink()
    assert bound_folder(environment, folder, NOW, dry_run=False).gone == Size()


def test_empty_folders_go_a_day_later_and_the_folder_itself_stays(logs: Path) -> None:
    folder, environment = BoundedFolder(folder=str(logs), after=timedelta(days=1)), new_environment(logs.parent)
    today = datetime.now(UTC)
    assert bound_folder(environment, folder, today, dry_run=False).left == Size()
    assert len(list(logs.iterdir())) == 3, "a task may have made its folder just now"
    for day in range(2, 5):
        bound_folder(environment, folder, today + timedelta(days=day), dry_run=False)
        for path in logs.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
    assert [path.name for path in logs.iterdir()] == ["dag_id=anabranch_linked"]
    assert bound_folder(environment, BoundedFolder(folder=str(logs / "nowhere")), NOW, dry_run=False).gone == Size()


def test_a_folder_of_a_hundred_times_its_number_is_never_in_memory_whole() -> None:
    bounds = Bounds(BoundedFolder(folder="/logs", most=100), NOW)
    kept: list[int] = []

    def many() -> Iterator[Stored]:
        for i in range(10_000):
            kept.append(bounds.left().files)
            yield Stored(f"file:///logs/{i}", 1, NOW - timedelta(seconds=i * 7919 % 10_000))

    gone = [file.modified for file in bounds.beyond(many())]
    assert max(kept) == 100 and len(gone) == 9_900
    assert max(gone) == NOW - timedelta(seconds=100) and bounds.left() == Size(100, 100)


def test_files_that_cannot_be_deleted_keep_none_of_later_turns(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving_layer.bounded._FILES_AT_ONCE", 2)
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if "dag_id=other/run_id=5" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    folder = BoundedFolder(folder=str(logs), after=timedelta(days=1, hours=1))
    with pytest.raises(Transient, match=r"found 1 left, first .*run_id=5/attempt=1.log: .*Permission denied"):
        bound_folder(new_environment(logs.parent), folder, NOW, dry_run=False)
    assert {name.partition("/")[2].partition("/")[0] for name in names(logs)} == {
        "run_id=2026-11-20T00:00+00:00", "run_id=1", "run_id=5"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("{lake}", "apart from the warehouse"),
        ("{lake}/warehouse/games/events", "apart from the warehouse"),
        ("{lake}/warehouse", "apart from the warehouse"),
        (".", "expected s3://BUCKET/FOLDER"),
        ("/", "expected s3://BUCKET/FOLDER"),
        ("logs/../..", "expected s3://BUCKET/FOLDER"),
        ("s3://bucket", "expected s3://BUCKET/FOLDER"),
        ("gs://bucket/logs", "expected s3://BUCKET/FOLDER"),
        ("~", "apart from the home folder"),
        ("{cwd}", "apart from the working folder"),
    ],
)
def test_what_is_no_ones_log_is_refused(tmp_path: Path, folder: str, found: str) -> None:
    named = folder.format(lake=tmp_path, cwd=Path.cwd())
    catalog = Catalog(name="lake", uri=f"sqlite:///{tmp_path}/cat/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    with pytest.raises(ValueError, match=found):
        Environment(
            kafka=Kafka(bootstrap_servers="127.0.0.1:1"), catalog=catalog, bounded=(BoundedFolder(folder=named),)
        )


def test_a_warehouse_in_s3_is_no_log_either() -> None:
    catalog = Catalog(name="lake", uri="sqlite:////nowhere/catalog.db", warehouse="s3://lake/warehouse")
    for folder, is_refused in (("s3://lake/warehouse/logs", True), ("s3://lake/warehouse2", False)):
        given = {"kafka": Kafka(bootstrap_servers="127.0.0.1:1"), "catalog": catalog}
        bounded = (BoundedFolder(folder=folder),)
        if is_refused:
            with pytest.raises(ValueError, match="apart from the warehouse"):
                Environment(**given, bounded=bounded)
        else:
            assert Environment(**given, bounded=bounded).bounded == bounded


HOLDER = """\
import sys, time
from anabranch.temporary import temporary_folder
with temporary_folder("checkpoint") as folder:
    (folder / "offsets").write_text("12345")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_goes_and_what_is_at_work_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    foreign = write(tmp_path / "anabranch-notes" / "mine.txt", 900)
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, alive = (Path(h.stdout.readline().strip()) for h in holders if h.stdout is not None)
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait(30)
        later = datetime.now(UTC) + timedelta(days=30)
        assert killed.exists() and clear_abandoned(datetime.now(UTC)) == (0, 0), "made a moment ago"
        assert clear_abandoned(later, dry_run=True) == (2, 5)
        assert clear_abandoned(later) == (2, 5)
        assert not killed.parent.exists()
        assert (alive / "offsets").read_text() == "12345" and foreign.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(30)
            if holder.stdout is not None:
                holder.stdout.close()


def test_of_many_that_clear_at_once_one_deletes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a machine's jobs all start again: none trips over what another deletes under it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for folder in (tmp_path / f"anabranch-checkpoint-{number}" for number in range(20)):
        write(folder / "held", 900, size=0)
        for number in range(40):
            write(folder / "content" / str(number), 900)
    begin = Barrier(8)

    def clear() -> tuple[int, int]:
        begin.wait(30)
        return clear_abandoned(NOW)

    with ThreadPoolExecutor(8) as jobs:
        cleared = [job.result() for job in [jobs.submit(clear) for _ in range(8)]]
    assert [sum(counts) for counts in zip(*cleared, strict=True)] == [20 * 41, 20 * 400]
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_is_gone_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), temporary_folder("query") as folder:
        assert list(folder.iterdir()) == []
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    done = "from anabranch.temporary import process_folder; print(process_folder('query').is_dir())"
    ran = subprocess.run(
        [sys.executable, "-c", done], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.stdout == "True\n" and list(tmp_path.iterdir()) == []


def test_where_there_are_no_locks_a_folder_is_had_and_never_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's file system: to lock is refused, then, after an upgrade of it, allowed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        made = temporary_folder("checkpoint")
        folder = made.__enter__()
    assert clear_abandoned(datetime.now(UTC) + timedelta(days=1)) == (0, 0)
    assert folder.is_dir()
    made.__exit__(None, None, None)
    assert not folder.exists()


def test_a_folder_that_cannot_be_looked_through_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    folder = BoundedFolder(folder=str(tmp_path))
    with pytest.raises(Transient, match=f"list .*: expected the right to look at {tmp_path}/loop, found "):
        bound_folder(new_environment(tmp_path), folder, NOW, dry_run=False)
