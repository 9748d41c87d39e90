"""Temporary folders of killed processes go, others stay; files are deleted by exact names."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from anabranch.common.errors import Transient
from anabranch.common.temporary import clear_abandoned, temporary_folder
from anabranch.iceberg.files import delete_files, list_files

NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)


def write(path: Path, days: float, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    at = (NOW - timedelta(days=days)).timestamp()
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize("name", ["lake#old", "lake?x", "lake%20x", "lake x", "lake;x", "läke+&=x"])
def test_a_folder_is_listed_and_its_files_deleted_by_name(tmp_path: Path, name: str) -> None:
    """A location is no URI: another folder whose name ends before a `#` or `?` keeps its files."""
    other = write(tmp_path / "lake" / "part.parquet", 9)
    file = write(tmp_path / name / "data" / name, 9)
    io = PyArrowFileIO()
    for scheme in ("file://", "file:"):
        assert [f.path for f in list_files(io, f"{scheme}{tmp_path / name}")] == [f"file://{file}"]
    assert delete_files(io, [f"file://{file}"]) == 1
    assert other.exists() and not file.exists()


def test_a_folder_and_its_files_that_refuse_are_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    found = f"list .*: expected permission to read {tmp_path}/loop, found "
    with pytest.raises(Transient, match=found):
        list(list_files(PyArrowFileIO(), f"file://{tmp_path}"))
    first, last = write(tmp_path / "a", 9), write(tmp_path / "z", 9)
    held = write(tmp_path / "held" / "x", 9).parent  # unlink refuses a folder, also for root
    found = f"delete 3 files: expected permission, found 1 left, first file://{held}: "
    with pytest.raises(Transient, match=found):
        delete_files(PyArrowFileIO(), [f"file://{path}" for path in (first, held, last)])
    assert held.exists() and not first.exists() and not last.exists()


HOLDER = """\
import sys, time
from anabranch.common.temporary import temporary_folder
with temporary_folder("checkpoint") as folder:
    (folder / "offsets").write_text("12345")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of this process and of those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_a_dead_process_files_go(temporary: Path, tmp_path: Path) -> None:
    foreign = write(tmp_path / "anabranch-notes" / "mine.txt", 900)
    command, piped = [sys.executable, "-c", HOLDER], subprocess.PIPE
    holders = [subprocess.Popen(command, stdout=piped, text=True) for _ in range(2)]
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


def test_one_of_many_clean_ups_deletes_it(temporary: Path, tmp_path: Path) -> None:
    """As when a machine's jobs all start again: none trips over what another deletes under it."""
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


def test_a_temporary_folder_is_removed(temporary: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), temporary_folder("query") as folder:
        assert list(folder.iterdir()) == []
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    module, call = (
        "from anabranch.common.temporary import process_folder",
        "process_folder('query')",
    )
    command = [sys.executable, "-c", f"{module}; print({call}.is_dir())"]
    assert subprocess.check_output(command, text=True) == "True\n"
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_is_cleared(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network's file system: to lock is refused, then, after an upgrade of it, allowed."""

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
