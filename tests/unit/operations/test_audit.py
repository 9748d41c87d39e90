"""The audit over real files and a Kafka of values: nothing that is wrong with an hour passes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import numpy as np
import proofs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from brokers import Broker
from lakes import StreamLake, decide, new_state
from proofs import BEFORE, CUT, HOUR, NEXT, NOW, event, job, new_proof, record, spoil, stage_rows
from pydantic import SecretStr

from anabranch.cli.render.hours import audit_text
from anabranch.common.logs import Progress
from anabranch.config.environment import ErasureKeys
from anabranch.iceberg import commits, manifests
from anabranch.kafka.batches import CODES, spans
from anabranch.lifecycle.erasure import run as erasing
from anabranch.offsets.hours import Adoption, Cut, Timeline, shift
from anabranch.offsets.position import Topic
from anabranch.operations import audit
from anabranch.operations.audit import audit as count_again
from anabranch.operations.audit import checks, count
from anabranch.protocol import acts
from anabranch.protocol.state import Accepted, Confirmed

Recorded = Callable[[Any], None]


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    """Two accepted hours; the second: three rows, a dead letter, a duplicate, a gap."""
    made = new_proof(tmp_path)
    proofs.accept(made, HOUR, BEFORE, [event(0, o, HOUR) for o in range(4)])
    speed = [event(0, 4), event(0, 5), event(0, 6), event(0, 7, id="0-2")]
    proofs.read(made, speed, {0: 10})
    proofs.accept(
        made, NEXT, CUT, speed[:3], dead=[(0, 8)], duplicate=1, gap=1, gaps={"control": 1}
    )
    return made


def sentences(one: StreamLake, hours: tuple[str, str] | None = None) -> list[str]:
    report = count_again(job(one), hours, with_kafka=False)
    view = report.as_dict()
    messages = [d["message"] for hour in view["hours"] for d in hour["disagreements"]]
    messages += [d["message"] for d in view["other_disagreements"]]
    assert view["agrees"] is (not messages)
    assert [d.message for d in report.disagreements] == messages
    return messages


def test_an_hour_that_equals_its_ledger_row_agrees(one: StreamLake) -> None:
    report = count_again(job(one), None, with_kafka=False)
    view = report.as_dict()
    assert view["agrees"]
    second = view["hours"][1]
    assert second["partitions"]["0"] == {
        "cut": [4, 10], "rows": 3, "batch": 3, "dead": 1, "twice": 0, "outside": 0, "misplaced": 0,
        "kafka": None,
    }  # fmt: skip
    assert (second["kafka"], second["kafka_reason"]) == ("not read", "not asked")
    assert [h.hour for h in count_again(job(one), (HOUR, HOUR), with_kafka=False).hours] == [HOUR]
    # Hours that are not accepted are not audited.
    report = count_again(job(one), (shift(NEXT, 1), shift(NEXT, 9)), with_kafka=False)
    assert [*audit_text(report)] == ["events: no accepted hour to audit"]


def misplace(one: StreamLake) -> None:
    """A file of HOUR by its partition, in which a row names NEXT."""
    staged = stage_rows(one, [event(0, 9, HOUR)])
    path = urlparse(staged.files[0].file_path).path
    table = pq.read_table(path, partitioning=None)
    column = table.column_names.index("ingest_hour")
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array([NEXT], field.type)), path)
    one.change(commits.Change("main", staged.files))


def lose_behind_a_duplicate(one: StreamLake) -> None:
    """An error that no count shows: by its content alone, the record repeats no event."""
    spoil(one, remove_hour=NEXT, branch="batch")
    one.land(one.accept(stage_rows(one, [event(0, 4), event(0, 5)]), NEXT, Accepted(1, CUT)))
    lie(one, good=2, dead=1, duplicate=2, gap=1, gaps={"control": 1})


def lie(one: StreamLake, **counts: Any) -> None:
    record(one, decide(NEXT, "accepted", 1, CUT, NOW, served="batch", **counts))


SPOILED: dict[str, Callable[[StreamLake], None]] = {
    "a file taken out of main": lambda one: spoil(one, remove_hour=NEXT),
    "a row there twice": lambda one: spoil(one, add=[event(0, 5)]),
    "rows of other hours' ranges": lambda one: spoil(one, add=[event(0, 2), event(1, 7)]),
    "a row whose file has another hour": misplace,
    "an offset that is a row and a dead letter": lambda one: proofs.bury(one, [(NEXT, 0, 5)]),
    "counts of the ledger": (
        lambda one: lie(one, good=4, dead=1, duplicate=0, gap=1, gaps={"control": 2})
    ),
    "a balance of the ledger that does not close": (
        lambda one: lie(one, good=3, dead=1, duplicate=1, gap=0, gaps={})
    ),
    "a row lost behind a duplicate that never was": lose_behind_a_duplicate,
    "files of hours before the first": lambda one: spoil(one, add=[event(0, 1, "2026-11-20T00")]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_is_all_that_is_said(one: StreamLake, name: str, recorded: Recorded) -> None:
    SPOILED[name](one)
    recorded(sentences(one))


def damaged_page(whole: bytes) -> bytes:
    """The offsets' page is damaged, not the file's footer."""
    group = pq.read_metadata(pa.BufferReader(whole)).row_group(0)
    columns = {(c := group.column(i)).path_in_schema: c for i in range(group.num_columns)}
    at = columns["kafka_offset"].data_page_offset
    return whole[:at] + b"\xff" * 20 + whole[at + 20 :]


@pytest.mark.parametrize(
    ("damaged", "found"),
    [
        (None, "none"),
        (lambda whole: b"", "ArrowInvalid: "),
        (lambda whole: whole[:-1], "ArrowInvalid: "),
        (damaged_page, "OSError: Couldn't deserialize thrift"),
    ],
)
def test_a_file_that_is_missing_or_damaged_in_storage(
    one: StreamLake, damaged: Callable[[bytes], bytes] | None, found: str
) -> None:
    (data_file,) = manifests.files_of(one.table(), "main", NEXT)
    file = Path(urlparse(data_file.file_path).path)
    if damaged is None:
        file.unlink()
    else:
        file.write_bytes(damaged(file.read_bytes()))
    messages = sentences(one)
    expected = f"hour {NEXT}: storage: expected the data file {data_file.file_path}, found {found}"
    assert messages[0].startswith(expected)
    remedy = f"(`anabranch batch STREAM --hour {NEXT} --restate` builds the hour again)"
    assert messages[0].endswith(remedy)
    assert len(messages) == 3, "rows of main and of branch batch are missing too"


def test_a_lost_file_of_an_hour_that_waits_is_built_and_not_restated(tmp_path: Path) -> None:
    waiting = new_proof(tmp_path)
    proofs.read(waiting, [event(0, o, HOUR) for o in range(4)], {0: 4})
    (data_file,) = manifests.files_of(waiting.table(), "main", HOUR)
    Path(urlparse(data_file.file_path).path).unlink()
    [message] = sentences(waiting)
    remedy = f"(`anabranch batch STREAM --hour {HOUR}` builds the hour again)"
    assert message.endswith(f"found none {remedy}")


def test_a_ledger_with_another_cut_or_revision(one: StreamLake) -> None:
    counts = {"good": 3, "dead": 1, "duplicate": 1, "gap": 1, "gaps": {"control": 1}}
    other = Cut("t", {0: (4, 11), 1: (0, 0)})
    record(one, decide(NEXT, "accepted", 2, other, NOW, served="batch", **counts))
    messages = sentences(one, (NEXT, NEXT))
    expected = f"hour {NEXT}: revision: expected 1, as on branch batch, found 2 in the ledger"
    assert messages[0] == expected
    assert messages[1].startswith(f"hour {NEXT}: cut: expected ")
    assert messages[2] == f"hour {NEXT}: ledger: expected 6 offsets, the size of its cut, found 7"


FIRST_ROW = decide(
    HOUR, "accepted", 1, BEFORE, NOW, served="batch", good=4, dead=0, duplicate=0, gap=0
)


def test_an_hour_that_only_the_ledger_accepts(tmp_path: Path, recorded: Recorded) -> None:
    one = new_proof(tmp_path)
    record(one, FIRST_ROW)
    recorded(sentences(one))


def test_an_hour_that_only_the_table_accepts(tmp_path: Path, recorded: Recorded) -> None:
    one = new_proof(tmp_path)
    staged = stage_rows(one, [event(0, o, HOUR) for o in range(4)])
    one.land(replace(one.accept(staged, HOUR, Accepted(1, BEFORE)), decisions=(FIRST_ROW,)))
    # It waits on the branch to be written, which says as much.
    assert sentences(one) == []
    confirmed = Confirmed(frozenset({FIRST_ROW.decision_id}))
    one.change(*map(commits.Change, ("batch", "main", "speed")), confirmed=confirmed)
    recorded(sentences(one))
    record(one, decide(HOUR, "sealed", 0, BEFORE, NOW, served="speed"))
    recorded(sentences(one))


def test_an_hour_served_by_the_speed_layer_contains_its_duplicates(one: StreamLake) -> None:
    acts.serve_hour(one.publisher, NEXT, "speed", "the rule is wrong")
    bury_speed(one)
    assert sentences(one) == []
    spoil(one, add=[event(0, 9)])
    expected = f"hour {NEXT}: rows of main: expected 4, as in the ledger, found 5 offsets"
    assert expected in sentences(one)


def test_an_hour_served_by_the_speed_layer_of_which_a_duplicate_was_erased(one: StreamLake) -> None:
    acts.serve_hour(one.publisher, NEXT, "speed", "the rule is wrong")
    bury_speed(one)
    keys = ErasureKeys(key=(SecretStr("a key of unit tests"),))
    environment = one.environment.model_copy(update={"erasure": keys})
    kafka = Broker(log={0: [0] * 10, 1: []}).adapter
    keyed = replace(job(one), environment=environment, kafka=kafka)
    # The hazard: batch has a row of it in the hour before, the speed layer its duplicate here.
    request = erasing.ErasureRequest("id", frozenset({"0-2"}), "case 1")
    done = erasing.erase(keyed, one.publisher, request)
    assert (done.left, done.removed.hours, len(one.rows("main"))) == (None, (HOUR, NEXT), 6)
    assert sentences(one) == []
    spoil(one, remove_hour=NEXT, branch="main")
    spoil(one, add=[event(0, 4)])
    expected = f"hour {NEXT}: rows of main: expected 3, as in the ledger, found 1 offsets"
    assert expected in sentences(one)


def bury_speed(one: StreamLake) -> None:
    """The swap gave `main` the speed layer's dead letters, of which the fixture has none."""
    if not [row for row in one.dead("main") if row[0] == NEXT]:
        proofs.bury(one, [(NEXT, 0, 8)], ("speed", "main"))


def test_hours_begin_where_the_hour_before_ended() -> None:
    timeline = Timeline(HOUR, shift(HOUR, 4), {0: 9})
    cuts = {HOUR: Cut("t", {0: (0, 4)}), NEXT: Cut("t", {0: (5, 9), 1: (0, 3)})}
    cuts[shift(HOUR, 3)] = Cut("t", {0: (50, 60)})
    found = (
        f"hour {NEXT}, partition 0: start of the cut: expected 4, the end of hour {HOUR}, found 5"
    )
    assert [d.message for d in checks.check_adjacent_cuts(cuts, timeline)] == [found]
    adopted = replace(timeline, adoptions=(Adoption(HOUR, "t", {0: 5}),))
    assert checks.check_adjacent_cuts(cuts, adopted) == []
    assert checks.check_adjacent_cuts(cuts | {NEXT: Cut("u", {0: (0, 9)})}, timeline) == []


# What Kafka gives is values here: the adapter is tested on a real broker.
RANGES = {0: (4, 10)}
ROW = decide(
    NEXT, "accepted", 1, None, NOW, offsets=6, good=3, dead=1, duplicate=1, gap=1,
    gaps={"control": 1},
)  # fmt: skip


def kafka(
    given: list[int],
    log: tuple[int, int] | None = (4, 10),
    rows: tuple[int, ...] = (4, 5, 6),
    shown: dict[int, str] = MappingProxyType({9: "control"}),  # type: ignore[assignment]
    **values: Any,
) -> list[str]:
    """The sentences of an hour of rows 4, 5 and 6 and dead letter 8, of which Kafka gives `given`;
    of other offsets its log shows the class, which is compaction where nothing else is said."""
    counted = {
        "rows": count.FileCounts(mark(rows)),
        "batch": count.FileCounts(mark(rows)),
        "dead": count.FileCounts(mark((8,))),
    }
    ranges = {0: log} if log is not None else {}
    shown_as = {o: "present" if o in given else shown.get(o, "compacted") for o in range(100)}
    codes = {
        p: np.array([CODES[shown_as[o]] for o in range(*of)], np.uint8) for p, of in ranges.items()
    }
    found = count.recount(RANGES, counted, ranges, codes)
    audited = checks.Audited(NEXT, "batch", True, 1, Cut("t", RANGES), ROW, found)
    return [d.message for d in checks.find_disagreements(replace(audited, **values))]


def mark(offsets: tuple[int, ...]) -> count.OffsetCounts:
    marks = count.OffsetCounts(RANGES)
    marks.add(np.zeros(len(offsets), np.int32), np.array(offsets, np.int64))
    return marks


def test_what_kafka_gives_is_compared(recorded: Recorded) -> None:
    both = {8: "control", 9: "control"}
    found = {
        "all": kafka([4, 5, 6, 7, 8]),
        "an offset in Kafka and in no table": kafka([4, 5, 6, 7, 8, 9]),
        "an offset that is kept and Kafka does not give": kafka([4, 6, 7, 8], shown=both | {5: "control"}),
        # A log that was compacted gives less from day to day, whatever the topic's policy is by now.
        "less after a compaction": kafka([4, 6, 8]),
        "a gap of another class than the log shows": kafka([4, 5, 6, 7, 8], shown={9: "aborted"}),
        "a part": kafka([6, 7, 8], log=(6, 10)),
        "a smaller part": kafka([8], log=(8, 10)),
        "a part, with an offset in no table": kafka([6, 7, 8, 9], log=(6, 10)),
        "a part, and an offset is kept": kafka([], log=(8, 10), shown=both),
        "nothing": kafka([], log=None, kafka="retention took all of it"),
    }  # fmt: skip
    assert [name for name, wrong in found.items() if not wrong] == [
        "all", "less after a compaction", "a part", "a smaller part", "nothing",
    ]  # fmt: skip
    recorded(found)


def test_the_part_of_a_cut_that_is_in_kafka() -> None:
    ranges = {0: (4, 10), 1: (0, 5), 2: (3, 3)}
    assert audit.clip_to_log(ranges, {0: 6, 1: 5, 2: 0}, {0: 20, 1: 9, 2: 9}) == {0: (6, 10)}
    assert audit.clip_to_log(ranges, {0: 0, 1: 0}, {0: 8, 1: 9}) == {0: (4, 8), 1: (0, 5)}


def test_offsets_that_retention_deletes_meanwhile_are_not_compared() -> None:
    starts = iter(({0: 3, 1: 0}, {0: 6, 1: 5}))
    asked = SimpleNamespace(
        log_starts=lambda topic: next(starts), stable_ends=lambda topic: {0: 9, 1: 5},
        classify=lambda topic, p, start, end: np.arange(start, end, dtype=np.uint8),
    )  # fmt: skip
    of = SimpleNamespace(kafka=asked)
    cut = Cut("t", {0: (4, 10), 1: (0, 5)})
    codes, there = audit._read(
        of, Topic("events", "t", (0, 1)), cut, Progress(audit.LOG, "audit", "hours")
    )
    assert there == {0: (6, 9)}
    assert {p: found.tolist() for p, found in codes.items()} == {0: [6, 7, 8]}


def test_an_hour_of_a_deleted_log_is_not_read_from_another() -> None:
    timeline = Timeline(HOUR, shift(HOUR, 3), {0: 10})
    state = new_state(timeline)
    assert audit.kafka_unavailable_reason(state, NEXT, CUT, Topic("events", "t", (0, 1))) is None
    assert audit.kafka_unavailable_reason(state, NEXT, CUT, None) == "the topic does not exist"
    found = audit.kafka_unavailable_reason(state, NEXT, CUT, Topic("events", "u", (0, 1)))
    assert found == "the topic was recreated since"
    again = new_state(replace(timeline, adoptions=(Adoption(NEXT, "t", {0: 6}),)))
    got = audit.kafka_unavailable_reason(again, NEXT, CUT, Topic("events", "t", (0, 1)))
    assert got == "its log was restarted since"
    topic = Topic("events", "t", (0, 1))
    assert audit.kafka_unavailable_reason(again, shift(NEXT, 1), CUT, topic) is None


def test_marks_count_each_offset_wherever_it_comes_again() -> None:
    marks = count.OffsetCounts({0: (10, 14), 3: (0, 2)})
    marks.add(np.array([0, 0, 3, 0, 7]), np.array([10, 10, 1, 9, 1]))
    marks.add(np.array([0, 0, 3]), np.array([10, 13, 2]))
    assert (marks.distinct(0), marks.distinct(3), marks.distinct(7)) == (2, 1, 0)
    assert marks.twice == {0: 2}
    assert marks.outside == {0: 1, 7: 1, 3: 1}
    for _ in range(300):
        marks.add(np.array([0]), np.array([12]))
    assert (marks.distinct(0), marks.twice[0]) == (3, 301), "a byte must not run over"
    # Spans of offsets.
    assert spans(np.array([True, True, False, True]), 5) == ((5, 7), (8, 9))
    assert spans(np.array([], bool), 5) == ()
    assert spans(np.tile([True, False], 9), 0) == ((0, 1), (2, 3), (4, 5))


def test_anothers_files_of_the_same_rows(one: StreamLake, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    table = one.table()
    old = manifests.files_of(table, "main", NEXT)
    rewritten = stage_rows(one, [event(0, 6), event(0, 4), event(0, 5)])
    one.change(commits.Change("main", rewritten.files, old, rewrites=True))
    assert sentences(one) == []
    expected = (
        f"audit: another program replaced files on main with the same rows hour={NEXT} files=1 "
        "replaced=1"
    )
    assert expected in caplog.text
    # With another value they are not those of the hour.
    old = manifests.files_of(one.table(), "main", NEXT)
    rewritten = stage_rows(one, [event(0, 6), event(0, 4), event(0, 5) | {"n": 4711}])
    one.change(commits.Change("main", rewritten.files, old, rewrites=True))
    assert "main: expected the files of the batch layer" in sentences(one)[0]
