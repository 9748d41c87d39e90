"""Dead letters as people read them: reasons counted, bytes of any kind as text."""

from datetime import UTC, datetime
from typing import Any

import pytest
from lakes import StreamLake, stage
from proofs import HOUR, NEXT, job

from anabranch.cli.render.rows import letters_text
from anabranch.cli.report import print_text
from anabranch.common.output import plain
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.snapshots import heads
from anabranch.operations.reports import dead_letters
from anabranch.operations.reports.dead_letters import Letter
from anabranch.protocol.publish import new_id


def bury(one: StreamLake, *rows: dict[str, Any], branches: tuple[str, ...] = ("main",)) -> None:
    name = one.stream.dead_letters_table
    given = {
        "topic_id": "t", "kafka_partition": 0, "ingest_hour": HOUR, "error_code": "malformed_json",
        "layer": "x",
    }  # fmt: skip
    staged = stage(one.lake, name, [given | row for row in rows])
    table = one.lake.load(name)
    changes = tuple(Change(b, staged.files) for b in branches)
    assert one.lake.commit(table, Commit(new_id(), heads(table), changes)) is Outcome.LANDED


@pytest.mark.parametrize(
    ("data", "longest", "text"),
    [
        (None, 9, None),
        (b"", 9, ""),
        (b"{not json", 9, "{not json"),
        (b"a\xff\xfeb", 20, "a\\xff\\xfeb"),
        ("\u00fc\u20ac".encode(), 9, "\u00fc\u20ac"),
        (b"0123456789", 9, "012345678…"),
        # Cut in the middle of a character: not taken for broken UTF-8.
        ("\u20ac".encode() * 30, 9, "\u20ac" * 9 + "…"),
        (b"x" + "\U0001f600".encode() * 30, 9, "x" + "\U0001f600" * 8 + "…"),
        # Broken at the very end.
        (b"a\xe2\x82", 9, "a\\xe2\\x82"),
    ],
)
def test_bytes_of_any_kind_are_shown(data: bytes | None, longest: int, text: str | None) -> None:
    assert dead_letters.shown(data, longest) == text


def test_reasons_are_counted_and_shown_with_their_first_records(one: StreamLake) -> None:
    at = datetime(2026, 11, 21, 0, 30, tzinfo=UTC)
    bury(
        one,
        {"kafka_offset": 3, "value": b"{c"},
        {
            "kafka_offset": 1, "value": b"{a\x00\xff", "key": b"k", "kafka_timestamp": at,
            "error_text": "broken",
        },
        {"kafka_offset": 2, "error_code": "null_value"},
        {"kafka_offset": 4, "ingest_hour": NEXT, "value": b"{d"},
    )  # fmt: skip
    bury(one, {"kafka_offset": 9, "value": b"speed's own"}, branches=("speed",))

    view = dead_letters.letters(job(one), None, 2)

    assert [(r.reason, r.count, r.first_hour, r.last_hour) for r in view.reasons] == [
        ("malformed_json", 3, HOUR, NEXT), ("null_value", 1, HOUR, HOUR),
    ]  # fmt: skip
    assert view.dead == 4
    first, second = view.reasons[0].samples
    assert first == Letter(HOUR, 0, 1, at, "broken", "k", "{a\x00\\xff", 4)
    assert second.offset == 3
    assert view.reasons[1].samples[0].value is None


def test_hours_choose_and_none_is_said(one: StreamLake, capsys: pytest.CaptureFixture[str]) -> None:
    bury(
        one,
        {"kafka_offset": 1, "value": b"{"},
        {"kafka_offset": 2, "value": b"[", "ingest_hour": NEXT},
    )
    view = dead_letters.letters(job(one), (NEXT, NEXT), 3)
    assert [s.offset for r in view.reasons for s in r.samples] == [2]
    print_text(letters_text(dead_letters.letters(job(one), ("2026-11-22T00", "2026-11-22T05"), 3)))
    assert "no dead letters of the hours 2026-11-22T00 to 2026-11-22T05" in capsys.readouterr().out


def test_a_value_is_one_line_of_text(one: StreamLake, capsys: pytest.CaptureFixture[str]) -> None:
    bury(one, {"kafka_offset": 1, "value": b"\x1b[31m\n" + b"x" * 1_000_000})
    view = dead_letters.letters(job(one), None, 3)
    print_text(letters_text(view))
    output = capsys.readouterr().out
    assert r"  value: \x1b[31m\nxxx" in output
    assert "… (1000006 bytes)" in output
    assert max(map(len, output.splitlines())) < 250
    assert "\x1b" not in output
    assert len(plain(view)["reasons"][0]["samples"][0]["value"]) == 2001
