"""The note of the offsets that a process reads: what the next start takes from it."""

import tempfile
from pathlib import Path

import pytest

from anabranch.kafka.large_records import AHEAD
from speed_layer.reading_note import Noted, ReadingNote


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_reads_what_a_dead_process_wrote() -> None:
    ReadingNote("t").write({0: (5, 9), 1: (0, 3)}, 2)
    assert ReadingNote("t").before == Noted({0: (5, 9), 1: (0, 3)}, 2)
    assert ReadingNote("other").before == Noted()
    # It ended before the offsets were read again, such as while it looked for the record.
    ReadingNote("t").write({0: (5, 9)}, 1)
    ReadingNote("t").remove()
    assert ReadingNote("t").before == Noted({0: (5, 9)}, 1)


def test_a_process_leaves_no_note_at_its_end_or_without_a_folder(folder: Path) -> None:
    note = ReadingNote("t")
    note.write({0: (5, 9)}, 0)
    note.remove()
    note.remove()
    assert ReadingNote("t").before == Noted() and not [*folder.iterdir()]
    note = ReadingNote("t")
    folder.rmdir()
    note.write({0: (5, 9)}, 0)
    note.remove()


@pytest.mark.parametrize("text", ["", "[]", '{"ranges": {"x": 1}}', "[" * 100_000])
def test_a_note_of_others_is_none(folder: Path, text: str) -> None:
    ReadingNote("t").write({0: (5, 9)}, 0)
    [file] = folder.iterdir()
    file.write_text(text)
    assert ReadingNote("t").before == Noted()


@pytest.mark.parametrize(
    ("position", "ends", "suspects"),
    [
        ({0: 5}, {0: 9}, {0: (5, 9)}),
        ({0: 7}, {0: 9_000}, {0: (7, 9 + AHEAD)}),
        ({0: 9}, {0: 9_000}, {}),
        ({0: 20}, {0: 9_000}, {}),
        ({0: 7}, {0: 7}, {}),
        ({1: 7}, {1: 9}, {}),
    ],
    ids=["all", "a part", "published", "long ago", "the log ends before", "another partition"],
)
def test_only_offsets_that_were_not_published_are_suspects(
    position: dict[int, int], ends: dict[int, int], suspects: dict[int, tuple[int, int]]
) -> None:
    assert Noted({0: (5, 9)}).suspects(position, ends) == suspects
