"""An hour's rows in both layers, read from real files: what differs, and which record repeats
which."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from lakes import StreamLake, new_state
from proofs import CUT, HOUR, NEXT, accept, event, job, read
from pyiceberg.types import LongType, StringType

from anabranch.cli import main
from anabranch.common.errors import Refused
from anabranch.iceberg.commits import Change
from anabranch.iceberg.manifests import files_of
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.operations.reports import dead_letters
from anabranch.protocol.ledger_row import Diff
from anabranch.protocol.publish import Publish, new_id
from serving_layer.layer_diff import Place


def accept_before(one: StreamLake) -> None:
    accept(one, HOUR, Cut("t", {0: (0, 4)}), [event(0, o, HOUR) for o in range(4)])


def test_each_row_that_differs_is_shown_with_its_content(one: StreamLake) -> None:
    accept_before(one)
    # 4 is the same, 5 repeats a row of the hour before, 6 one of its own hour, 7 changed, 8 in
    # speed alone, 9 in batch.
    speed = [
        event(0, 4), event(0, 5, id="0-2"), event(0, 6, id="0-4"), event(0, 7, n=1), event(0, 8),
    ]  # fmt: skip
    read(one, speed, {0: 10})
    accept(one, NEXT, CUT, [event(0, 4), event(0, 7, n=2), event(0, 9)], duplicate=2)

    view = dead_letters.difference(job(one), NEXT, 5)

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


def test_a_column_added_since_and_a_type_widened_change_no_row(one: StreamLake) -> None:
    """The hazard: earlier rows are null in a new column for that reason alone."""
    accept_before(one)
    read(one, [event(0, 4), event(0, 5, n=7)], {0: 10})
    with one.table().update_schema() as update:
        update.update_column("n", LongType())
        update.add_column("later", StringType())
    accept(one, NEXT, CUT, [event(0, 4, later="a"), event(0, 5, n=8, later="b")])

    view = dead_letters.difference(job(one), NEXT, 5)

    assert view.diff == Diff(missing=0, extra=0, changed=1, duplicate=0, unread=0)
    [changed] = view.samples
    assert (changed.offset, changed.columns) == (5, ("n",))


def test_rows_that_the_speed_layer_has_not_read_are_explained(one: StreamLake) -> None:
    accept_before(one)
    read(one, [event(0, 4)], {0: 5})
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 10)])
    view = dead_letters.difference(job(one), NEXT, 2)
    assert view.diff == Diff(missing=5, extra=0, changed=0, duplicate=0, unread=5)
    assert view.unexplained == {}
    assert view.uncovered == "the speed layer has not read it to its end"
    assert [s.offset for s in view.samples] == [5, 6]


def test_an_hour_that_is_not_accepted_has_nothing_to_compare(one: StreamLake) -> None:
    read(one, [event(0, 4)], {0: 10})
    for view in (dead_letters.difference, dead_letters.duplicates):
        with pytest.raises(Refused, match="anabranch explain events"):
            view(job(one), NEXT, 5)


def test_each_duplicate_names_the_earliest_row_that_it_repeats(one: StreamLake) -> None:
    accept_before(one)
    read(
        one,
        [event(0, 4), event(0, 5, id="0-2"), event(0, 6, id="0-4"), event(0, 7, id="0-2")],
        {0: 10},
    )
    accept(one, NEXT, CUT, [event(0, 4)], duplicate=3)
    view = dead_letters.duplicates(job(one), NEXT, 100)
    assert [(d.offset, d.key, d.repeats) for d in view.duplicates] == [
        (5, {"id": "0-2"}, Place(HOUR, 0, 2)),
        (6, {"id": "0-4"}, Place(NEXT, 0, 4)),
        (7, {"id": "0-2"}, Place(HOUR, 0, 2)),
    ]
    assert (view.counted, view.found, view.untold) == (3, 3, None)
    limited = dead_letters.duplicates(job(one), NEXT, 1)
    assert (limited.found, limited.listed) == (3, 1)


def test_no_row_beyond_the_look_back_is_repeated(one: StreamLake) -> None:
    accept_before(one)
    read(one, [event(0, 4), event(0, 5, id="0-2")], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4)], duplicate=1)
    none = replace(
        job(one),
        stream=one.stream.model_copy(
            update={"batch": one.stream.batch.model_copy(update={"lookback_hours": 0})}
        ),
    )
    view = dead_letters.duplicates(none, NEXT, 5)
    assert (view.counted, view.found) == (1, 0)
    assert (
        view.untold
        == "1 cannot be found: the rows that they repeat are no longer in the hour or its look-back"
    )


def test_null_parts_of_a_key_equal_each_other(one: StreamLake) -> None:
    accept_before(one)
    read(
        one,
        [event(0, 4, id="x", n=None), event(0, 5, id="x", n=None), event(0, 6, id="x", n=1)],
        {0: 10},
    )
    accept(one, NEXT, CUT, [event(0, 4, id="x", n=None), event(0, 6, id="x", n=1)], duplicate=1)
    two_parts = replace(job(one), stream=one.stream.model_copy(update={"key": ("id", "n")}))
    (duplicate,) = dead_letters.duplicates(two_parts, NEXT, 5).duplicates
    assert (duplicate.offset, duplicate.key) == (5, {"id": "x", "n": None})
    assert duplicate.repeats == Place(NEXT, 0, 4)


def test_a_key_that_is_null_in_every_part_repeats_nothing(one: StreamLake) -> None:
    accept_before(one)
    read(
        one, [event(0, 4, n=None), event(0, 5, n=None), event(0, 6, n=1), event(0, 7, n=1)], {0: 10}
    )
    accept(one, NEXT, CUT, [event(0, 4, n=None), event(0, 6, n=1)], duplicate=2)
    keyed_by_n = replace(job(one), stream=one.stream.model_copy(update={"key": ("n",)}))
    view = dead_letters.duplicates(keyed_by_n, NEXT, 5)
    assert [d.offset for d in view.duplicates] == [7]
    assert (
        view.untold
        == "1 cannot be found: the rows that they repeat are no longer in the hour or its look-back"
    )


def test_duplicates_of_rows_that_maintenance_dropped_are_unknown(one: StreamLake) -> None:
    accept_before(one)
    read(one, [event(0, 4), event(0, 5, id="0-4")], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4)], duplicate=1)
    assert dead_letters.duplicates(job(one), NEXT, 5).found == 1, "there was nothing to lose"
    state = one.state()
    timeline = replace(state.timeline, covered_from=shift(NEXT, 1))
    drop = Change("speed", remove=files_of(state.table, "speed", NEXT))
    one.land(Publish(new_id(), (drop, Change("main")), timeline), state)
    view = dead_letters.duplicates(job(one), NEXT, 5)
    assert (view.counted, view.found) == (1, 0)
    assert view.untold == (
        "1 cannot be found: they are found in the speed layer's rows, and those of the hour "
        "were deleted (`anabranch maintain`)"
    )


def test_the_text_for_unknown_duplicates() -> None:
    skipped = new_state(Timeline(HOUR, shift(HOUR, 2), {0: 10}, skipped=(NEXT,)), {0: 10})
    assert dead_letters.not_found_reason(skipped, NEXT, 3, 3) is None
    assert "the speed layer skipped it, wholly or in part" in str(
        dead_letters.not_found_reason(skipped, NEXT, 3, 1)
    )
    assert str(dead_letters.not_found_reason(skipped, NEXT, 1, 3)).startswith(
        "2 more than the ledger counts"
    )
    assert "the ledger has no count" in str(dead_letters.not_found_reason(skipped, NEXT, None, 0))


def test_the_command_adds_the_rows(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_before(one)
    read(one, [event(0, 4, n=1), event(0, 5, id="0-4")], {0: 10})
    accept(one, NEXT, CUT, [event(0, 4, n=2)], duplicate=1)
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: job(one))
    asked = ["explain", "events", NEXT, "--rows"]
    done = CliRunner().invoke(main, [*asked, "--output", "json"])
    view = json.loads(done.stdout)
    assert (done.exit_code, view["state"], len(view["sentences"]) > 5) == (1, "accepted", True)
    assert view["difference"]["unexplained"] == {"changed": 1}
    assert (view["duplicates"]["counted"], view["duplicates"]["found"]) == (1, 1)
    shown = CliRunner().invoke(main, asked).stdout
    assert "1 duplicates counted, 1 found" in shown
    assert shown.endswith("nothing explains 1 changed\n")
    assert CliRunner().invoke(main, asked[:-1]).exit_code == 0
