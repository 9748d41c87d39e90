"""Operators' acts: each is in the ledger with user, host, time and reason; no other decision."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from brokers import Broker
from conf_folders import said
from lakes import FIRST, StreamLake, decide, new_lake

from anabranch.common.errors import ConfigurationError
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.operations.reports.acts import act_records, hours_words
from anabranch.protocol.acts import serve_hour
from anabranch.protocol.apply import restore_ledger
from anabranch.protocol.ledger import decision, newest
from anabranch.protocol.ledger_row import Act, LedgerRow, act_now
from batch_layer.plan import act_to_record

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECOND = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 3)})
ACT = Act("restate", "ada", "ops-1", NOW, "late schema")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamLake:
    """Hour 0 sealed; the operator is ada."""
    monkeypatch.setenv("LOGNAME", "ada")
    made = new_lake(tmp_path, timeline=Timeline(FIRST, SECOND, {0: 3}, sealed={FIRST: CUT}))
    made.publish(made.speed(made.stage([(FIRST, 0, o) for o in range(3)]), {0: 3}))
    return made


def test_an_act_is_the_same_waiting_and_read_back(lake: StreamLake) -> None:
    row = decision(FIRST, "accepted", 2, CUT, NOW, "one", served="batch", act=ACT)
    assert LedgerRow.from_waiting(row.as_waiting()).act == ACT
    lake.ledger.record([row, decision(FIRST, "sealed", 0, CUT, NOW, "zero")])
    assert [read.act for read in lake.ledger.history() if read.decision_id == "one"] == [ACT]
    assert [read.decision_id for read in lake.ledger.acts()] == ["one"]


def test_a_chosen_layer_is_recorded_with_its_operator(lake: StreamLake) -> None:
    publisher = lake.publisher
    began = datetime.now(UTC)
    assert serve_hour(publisher, FIRST, "speed", "batch dropped too much").changed
    assert not serve_hour(publisher, FIRST, "speed", "again").changed
    [record] = act_records(lake.ledger.acts())
    assert (record.act, record.user, record.why) == ("override", "ada", "batch dropped too much")
    assert record.host
    assert began <= record.at <= datetime.now(UTC)
    assert (record.hours, record.decisions) == ((FIRST,), {"served": 1})


def test_a_reason_that_is_no_text_is_refused_before_anything_is_published(lake: StreamLake) -> None:
    """Python reads an argument that is no UTF-8 so. The ledger cannot store its row."""
    publisher, before = lake.publisher, lake.state().heads
    with pytest.raises(ConfigurationError, match=r"--why: expected UTF-8 text, found 'caf.udce9'"):
        serve_hour(publisher, FIRST, "speed", "caf\udce9")
    with pytest.raises(ConfigurationError, match=r"--why: expected a reason, found none"):
        serve_hour(publisher, FIRST, "speed", " ")
    assert lake.state().heads == before
    lake.publisher.recover()


def test_an_act_over_many_hours_is_one_record(lake: StreamLake) -> None:
    rows = [
        decision(h, "accepted", 2, CUT, NOW, h, act=ACT, reason=ACT.why) for h in (SECOND, FIRST)
    ]
    rows.append(
        decision(
            shift(FIRST, 2), "refused", 2, CUT, NOW, "r", act=ACT,
            reason="the balance does not close",
        )
    )  # fmt: skip
    lake.ledger.record([*rows, decision(shift(FIRST, 3), "accepted", 1, CUT, NOW, "by itself")])
    [record] = act_records(lake.ledger.acts())
    assert record.hours == (FIRST, SECOND, shift(FIRST, 2))
    assert record.decisions == {"accepted": 2, "refused": 1}
    assert record.reasons == ("the balance does not close",)
    assert hours_words(record) == f"{FIRST}..{shift(FIRST, 2)} (3)"


def test_a_redelivery_does_not_change_the_ledger(lake: StreamLake) -> None:
    refused = decision(FIRST, "refused", 1, CUT, NOW, "refused", reason="no")
    lake.ledger.record([refused])
    before = newest(lake.ledger.history())
    act = act_now("redeliver", "restored a backup")
    lake.ledger.record([decision(FIRST, "redelivered", 0, None, act.at, reason="to lake", act=act)])
    assert newest(lake.ledger.history()) == before
    assert lake.ledger.remarkable_hours() == {FIRST}
    assert [row.decision for row in lake.ledger.history_since(0)] == ["refused"]
    assert [row.decision for row in lake.ledger.acts()] == ["redelivered"]


def test_a_ledger_that_has_only_a_redelivery_of_an_hour_is_restored(lake: StreamLake) -> None:
    lake.ledger.record([decision(FIRST, "redelivered", 0, None, NOW, "only", act=ACT)])
    assert restore_ledger(lake.lake, lake.stream) == 1
    assert [row.decision for row in lake.ledger.history([FIRST])] == ["sealed"]


def test_an_hour_follows_from_an_act_that_batch_would_not_have_done() -> None:
    assert act_to_record(None, 1, ["a gap"], True) is None
    assert act_to_record(ACT, 0, [], False) is None
    assert act_to_record(ACT, 1, [], False) == ACT
    chosen = act_to_record(ACT, 0, ["a gap"], True)
    assert chosen is not None
    assert (chosen.name, chosen.user) == ("accept", "ada")


def test_the_current_row_of_an_hour_has_the_act_of_its_newest_decision() -> None:
    rows = [
        decide(FIRST, "accepted", 2, CUT, NOW, "a", act=ACT.as_dict()),
        decide(FIRST, "accepted", 3, CUT, NOW, "b"),
    ]
    assert newest(rows[:1])[FIRST].act == ACT
    assert newest(rows)[FIRST].act is None


def test_history_lists_acts(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lake.environment, lake.stream, lake.lake, Broker().adapter)
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: job)
    acts = ("history", "events", "--acts")
    assert "no operator's act yet" in said(*acts)
    serve_hour(lake.publisher, FIRST, "speed", "batch dropped too much")
    shown = said(*acts)
    for part in ("override", "ada", FIRST, "1 served", "batch dropped too much"):
        assert part in shown
    assert "no operator's act yet" in said(*acts, "--hour", SECOND)
    assert "served" in said("history", "events", "--hour", FIRST)
