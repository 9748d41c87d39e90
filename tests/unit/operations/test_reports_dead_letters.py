"""Dead letters as people read them: reasons counted, bytes of any kind as text."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from conf_folders import said
from lakes import StreamLake, new_state, stage
from proofs import CUT, HOUR, NEXT, accept, event, job, read
from pyiceberg.types import LongType, StringType

from anabranch.cli.render.rows import letters_text
from anabranch.cli.report import print_text
from anabranch.common.errors import Refused
from anabranch.common.output import plain
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.manifests import files_of
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.operations.reports import dead_letters
from anabranch.operations.reports.dead_letters import Letter
from anabranch.protocol.ledger_row import Diff
from anabranch.protocol.publish import new_id
from serving_layer.layer_diff import Place


def bury(one: StreamLake, *rows: dict[str, Any], branches: tuple[str, ...] = ("main",)) -> None:
    name = one.stream.dead_letters_table
    given = {
        "topic_id": "t", "kafka_partition": 0, "ingest_hour": HOUR, "error_code": "malformed_json", "layer": "x",
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
    whole = {"key": b"k", "kafka_timestamp": at, "error_text": "broken"}
    bury(
        one,
        {"kafka_offset": 3, "value": b"{c"}, {"kafka_offset": 1, "value": b"{a\x00\xff", **whole},
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
    of_next = {"kafka_offset": 2, "value": b"[", "ingest_hour": NEXT}
    bury(one, {"kafka_offset": 1, "value": b"{"}, of_next)
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


# An hour's rows in both layers, read from real files: what differs, and which record repeats which.


def accept_before(one: StreamLake) -> None:
    accept(one, HOUR, Cut("t", {0: (0, 4)}), [event(0, o, HOUR) for o in range(4)])


def test_each_row_that_differs_is_shown_with_its_content(one: StreamLake) -> None:
    accept_before(one)
    # 4 is the same, 5 repeats the hour before, 6 its own, 7 changed, 8 in speed alone, 9 in batch.
    speed = [
        event(0, 4), event(0, 5, id="0-2"), event(0, 6, id="0-4"), event(0, 7, n=1), event(0, 8),
    ]  # fmt: skip
    read(one, speed, {0: 10})
    accept(one, NEXT, CUT, [event(0, 4), event(0, 7, n=2), event(0, 9)], duplicate=2)
    view = dead_letters.compare(job(one), NEXT, 5, 0).difference
    assert view.diff == Diff(missing=1, extra=1, changed=1, duplicate=2, unread=0)
    assert (view.speed_rows, view.batch_rows) == (5, 3)
    assert view.unexplained == {"missing": 1, "extra": 1, "changed": 1}
    shown = {(s.kind, s.offset): s for s in view.samples}
    assert [*shown] == [
        ("changed", 7), ("extra", 8), ("missing", 9), ("duplicate", 5), ("duplicate", 6),
    ]  # fmt: skip
    changed = shown["changed", 7]
    assert changed.columns == ("n",)
    assert ((changed.speed or {})["n"], (changed.batch or {})["n"]) == (1, 2)
    assert shown["extra", 8].batch is None
    assert (shown["missing", 9].batch or {})["id"] == "0-9"


def test_a_row_that_the_other_layer_made_a_dead_letter_is_explained(one: StreamLake) -> None:
    """As after a corrected schema: the speed layer's dead letters decode now, or no longer."""
    accept_before(one)
    read(one, [event(0, 4), event(0, 5), event(0, 6)], {0: 10})
    bury(one, *({"kafka_offset": o, "ingest_hour": NEXT} for o in (7, 8)), branches=("speed",))
    bury(one, {"kafka_offset": 6, "ingest_hour": NEXT}, branches=("batch", "main"))
    # A dead letter of the hour before is none of this hour.
    bury(one, {"kafka_offset": 5, "ingest_hour": HOUR}, branches=("batch",))
    accept(one, NEXT, CUT, [event(0, o) for o in (4, 7, 8, 9)])
    view = dead_letters.compare(job(one), NEXT, 5, 0).difference
    assert view.diff == Diff(3, 2, 0, 0, 0, missing_dead=2, extra_dead=1)
    assert view.unexplained == {"missing": 1, "extra": 1}
    assert [(s.kind, s.offset) for s in view.samples] == [
        ("extra", 5), ("missing", 9), ("missing_dead", 7), ("missing_dead", 8), ("extra_dead", 6),
    ]  # fmt: skip


def test_a_column_added_since_and_a_type_widened_change_no_row(one: StreamLake) -> None:
    """The hazard: earlier rows are null in a new column for that reason alone."""
    accept_before(one)
    read(one, [event(0, 4), event(0, 5, n=7)], {0: 10})
    with one.table().update_schema() as update:
        update.update_column("n", LongType())
        update.add_column("later", StringType())
    accept(one, NEXT, CUT, [event(0, 4, later="a"), event(0, 5, n=8, later="b")])
    view = dead_letters.compare(job(one), NEXT, 5, 0).difference
    assert view.diff == Diff(missing=0, extra=0, changed=1, duplicate=0, unread=0)
    [changed] = view.samples
    assert (changed.offset, changed.columns) == (5, ("n",))


def test_rows_that_the_speed_layer_has_not_read_are_explained(one: StreamLake) -> None:
    accept_before(one)
    read(one, [event(0, 4)], {0: 5})
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 10)])
    view = dead_letters.compare(job(one), NEXT, 2, 0).difference
    assert view.diff == Diff(missing=5, extra=0, changed=0, duplicate=0, unread=5)
    assert view.unexplained == {}
    assert view.uncovered == "the speed layer has not read it to its end"
    assert [s.offset for s in view.samples] == [5, 6]


def test_an_hour_that_is_not_accepted_has_nothing_to_compare(one: StreamLake) -> None:
    read(one, [event(0, 4)], {0: 10})
    with pytest.raises(Refused, match="anabranch explain events"):
        dead_letters.compare(job(one), NEXT, 5, 5)


def test_each_duplicate_names_the_earliest_row_that_it_repeats(one: StreamLake) -> None:
    accept_before(one)
    later = [event(0, 5, id="0-2"), event(0, 6, id="0-4"), event(0, 7, id="0-2")]
    read(one, [event(0, 4), *later], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4)], duplicate=3)
    view = dead_letters.compare(job(one), NEXT, 0, 100).duplicates
    assert [(d.offset, d.key, d.repeats) for d in view.duplicates] == [
        (5, {"id": "0-2"}, Place(HOUR, 0, 2)),
        (6, {"id": "0-4"}, Place(NEXT, 0, 4)),
        (7, {"id": "0-2"}, Place(HOUR, 0, 2)),
    ]
    assert (view.counted, view.found, view.untold) == (3, 3, None)
    limited = dead_letters.compare(job(one), NEXT, 0, 1).duplicates
    assert (limited.found, limited.listed) == (3, 1)


def test_no_row_beyond_the_look_back_is_repeated(one: StreamLake) -> None:
    accept_before(one)
    read(one, [event(0, 4), event(0, 5, id="0-2")], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4)], duplicate=1)
    batch = one.stream.batch.model_copy(update={"lookback_hours": 0})
    view = dead_letters.compare(job_of(one, batch=batch), NEXT, 0, 5).duplicates
    assert (view.counted, view.found, view.untold) == (1, 0, NOT_FOUND)


NOT_FOUND = (
    "1 cannot be found: the rows that they repeat are no longer in the hour or its look-back"
)


def job_of(one: StreamLake, **stream: Any) -> Job:
    return replace(job(one), stream=one.stream.model_copy(update=stream))


def test_null_parts_of_a_key_equal_each_other(one: StreamLake) -> None:
    accept_before(one)
    same = [event(0, o, id="x", n=None) for o in (4, 5)]
    read(one, [*same, event(0, 6, id="x", n=1)], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4, id="x", n=None), event(0, 6, id="x", n=1)], duplicate=1)
    two_parts = job_of(one, key=("id", "n"))
    (duplicate,) = dead_letters.compare(two_parts, NEXT, 0, 5).duplicates.duplicates
    assert (duplicate.offset, duplicate.key) == (5, {"id": "x", "n": None})
    assert duplicate.repeats == Place(NEXT, 0, 4)


def test_a_key_that_is_null_in_every_part_repeats_nothing(one: StreamLake) -> None:
    accept_before(one)
    rows = [event(0, o, n=n) for o, n in ((4, None), (5, None), (6, 1), (7, 1))]
    read(one, rows, {0: 10})
    accept(one, NEXT, CUT, [event(0, 4, n=None), event(0, 6, n=1)], duplicate=2)
    view = dead_letters.compare(job_of(one, key=("n",)), NEXT, 0, 5).duplicates
    assert ([d.offset for d in view.duplicates], view.untold) == ([7], NOT_FOUND)


def test_duplicates_of_rows_that_maintenance_dropped_are_unknown(one: StreamLake) -> None:
    accept_before(one)
    read(one, [event(0, 4), event(0, 5, id="0-4")], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4)], duplicate=1)
    # There was something to lose.
    assert dead_letters.compare(job(one), NEXT, 0, 5).duplicates.found == 1
    state = one.state()
    timeline = replace(state.timeline, covered_from=shift(NEXT, 1))
    drop = Change("speed", remove=files_of(state.table, "speed", NEXT))
    one.change(drop, Change("main"), timeline=timeline, state=state)
    view = dead_letters.compare(job(one), NEXT, 0, 5).duplicates
    assert (view.counted, view.found) == (1, 0)
    assert view.untold == (
        "1 cannot be found: they are found in the speed layer's rows, and those of the hour "
        "were deleted (`anabranch maintain`)"
    )


def test_the_text_for_unknown_duplicates() -> None:
    skipped = new_state(Timeline(HOUR, shift(HOUR, 2), {0: 10}, skipped=(NEXT,)), {0: 10})

    def why(counted: int | None, found: int) -> str | None:
        return dead_letters.not_found_reason(skipped, NEXT, counted, found)

    assert why(3, 3) is None
    assert "the speed layer skipped it, wholly or in part" in str(why(3, 1))
    assert str(why(1, 3)).startswith("2 more than the ledger counts")
    assert "the ledger has no count" in str(why(None, 0))


def test_the_command_adds_the_rows(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_before(one)
    read(one, [event(0, 4, n=1), event(0, 5, id="0-4")], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4, n=2)], duplicate=1)
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: job(one))
    asked = ["explain", "events", NEXT, "--rows"]
    view = json.loads(said(*asked, "--output", "json", expect=1))
    assert (view["state"], len(view["sentences"]) > 5) == ("accepted", True)
    assert view["difference"]["unexplained"] == {"changed": 1}
    assert (view["duplicates"]["counted"], view["duplicates"]["found"]) == (1, 1)
    shown = said(*asked, expect=1)
    assert "1 duplicates counted, 1 found" in shown
    assert shown.endswith("nothing explains 1 changed\n")
    said(*asked[:-1])
