"""The webhook, posted to a real HTTP server that takes, fails, hangs and comes back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from accepted_hours import accept, four_hours
from click.testing import CliRunner
from conf_folders import write_environment
from lakes import DDL, FIRST, StreamLake, decide, new_lake
from proofs import job, record
from receiver import Receiver, closed_port
from run_books import printed, words

from anabranch.cli import main
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.config import Webhook
from anabranch.job import Job
from anabranch.notifications import webhook
from anabranch.notifications.webhook import Notifier, notify
from anabranch.offsets.hours import Cut, shift
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import Kind, LedgerRow

NEXT = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 10)})
COUNTS = {"offsets": 10, "good": 8, "dead": 1, "duplicate": 1, "gap": 0}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().serving() as made:
        yield made


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    return new_lake(tmp_path)


def hooked(one: StreamLake, url: str, **settings: Any) -> Job:
    settings = {"within": "10 seconds", "headers": {"Authorization": "Bearer hunter2"}} | settings
    hook = Webhook.model_validate({"url": url, **settings})
    return replace(job(one), stream=one.stream.model_copy(update={"webhook": hook}))


def decided(one: StreamLake, hour: str, kind: Kind, revision: int, id: str, **values: Any) -> None:
    record(
        one, decide(hour, kind, revision, CUT, values.pop("at", datetime.now(UTC)), id, **values)
    )


def a_days_decisions(one: StreamLake) -> None:
    decided(one, FIRST, "sealed", 0, "a", served="speed")
    decided(one, NEXT, "sealed", 0, "b", served="speed", reason="sealed by adopting topic id u")
    decided(
        one,
        FIRST,
        "accepted",
        1,
        "c",
        served="batch",
        diff={"missing": 1, "extra": 0, "changed": 0},
        **COUNTS,
    )
    decided(
        one,
        NEXT,
        "refused",
        1,
        "d",
        served="speed",
        reason="quality: no",
        quality={"passed": False, "failed": [{}]},
    )
    decided(one, FIRST, "accepted", 2, "e", served="batch", **COUNTS)
    decided(one, FIRST, "refused", 3, "f", served="batch", reason="gaps")
    decided(one, FIRST, "served", 2, "g", served="speed", reason="the rule is wrong")


EVENTS = ["adopted", "accepted", "refused", "restated", "refused", "served"]


def test_each_change_is_posted_once_in_order_with_both_states(
    lake: StreamLake, receiver: Receiver
) -> None:
    a_days_decisions(lake)
    of = hooked(lake, receiver.url, page="https://status.example.com/")
    assert [p.event for p in Notifier(of).post()] == [m["event"] for m in receiver.taken] == EVENTS
    assert (
        [m["id"] for m in receiver.taken]
        == [h["Idempotency-Key"] for h in receiver.headers]
        == list("bcdefg")
    )
    assert {h["Authorization"] for h in receiver.headers} == {"Bearer hunter2"}
    _, accepted, refused, restated, refused_again, served = receiver.taken
    assert accepted.pop("recorded_at").startswith("20")
    assert accepted == {
        "id": "c",
        "event": "accepted",
        "stream": "events",
        "table": "games.events",
        "hour": FIRST,
        "revision": 1,
        "from": {"state": "sealed", "revision": 0, "served": "speed"},
        "to": {"state": "accepted", "revision": 1, "served": "batch"},
        "reason": None,
        "balance": COUNTS,
        "difference": {"missing": 1, "extra": 0, "changed": 0},
        "quality": None,
        "command": f"anabranch explain events {FIRST}",
        "link": f"https://status.example.com/streams/events/hours/{FIRST}",
        "text": f"events {FIRST} accepted as revision 1, served by batch "
        f"https://status.example.com/streams/events/hours/{FIRST}",
    }
    assert (refused["from"]["state"], refused["to"]["state"]) == ("sealed", "refused")
    assert refused["quality"] == {"passed": False, "failed": 1}
    assert (restated["from"]["revision"], restated["to"]["revision"]) == (1, 2)
    # A refused restatement takes nothing back.
    assert (
        refused_again["from"]
        == refused_again["to"]
        == {"state": "accepted", "revision": 2, "served": "batch"}
    )
    assert (served["from"]["served"], served["to"]["served"], served["reason"]) == (
        "batch",
        "speed",
        "the rule is wrong",
    )
    # What comes later comes alone, with what stood before it.
    assert list(Notifier(of).post()) == []
    decided(lake, NEXT, "accepted", 1, "h", served="batch")
    assert [p.id for p in Notifier(of).post()] == ["h"]
    assert receiver.taken[-1]["from"] == {"state": "refused", "revision": 0, "served": "speed"}


def test_the_balance_of_an_hour_with_erased_records_has_them(
    lake: StreamLake, receiver: Receiver
) -> None:
    decided(lake, FIRST, "accepted", 1, "a", served="batch", **COUNTS | {"good": 6, "erased": 2})
    list(Notifier(hooked(lake, receiver.url)).post())
    assert receiver.taken[0]["balance"] == COUNTS | {"good": 6, "erased": 2}


@pytest.mark.parametrize("mode", [500, 404, 307, "silent", "drips"])
def test_messages_that_a_receiver_refuses_wait_and_delay_no_job(
    lake: StreamLake, receiver: Receiver, mode: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    a_days_decisions(lake)
    of = hooked(lake, receiver.url)
    receiver.mode, receiver.after = mode, 2
    if isinstance(mode, str):
        # Within the test's time: it would hang for as long as the receiver does.
        of = hooked(lake, receiver.url, within=timedelta(seconds=0.5))
    with caplog.at_level(logging.WARNING):
        assert notify(of) is False
    assert not receiver.over.is_set()
    # Threads of other tests log too.
    [line] = [r.getMessage() for r in caplog.records if "notifications" in r.name]
    assert f"expected it to accept {NEXT} refused, found" in line
    assert not {"hunter2", "secret-part"} & set(line.replace("/", " ").split())
    with pytest.raises(Transient):
        list(Notifier(of).post())
    receiver.mode = "takes"
    assert notify(of) is True
    # None is missing, and none was taken twice.
    assert [m["event"] for m in receiver.taken] == EVENTS


def test_a_receiver_that_is_not_there_changes_nothing(
    lake: StreamLake, caplog: pytest.LogCaptureFixture
) -> None:
    a_days_decisions(lake)
    assert notify(hooked(lake, f"http://127.0.0.1:{closed_port()}/")) is False
    assert "found ConnectionError" in caplog.text
    assert notify(job(lake)) is True


def test_a_process_that_ends_between_the_answer_and_the_position_posts_the_same_ids_again(
    lake: StreamLake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_days_decisions(lake)
    of = hooked(lake, receiver.url)

    def killed(self: Notifier, position: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Notifier, "_keep", killed)
        list(Notifier(of).post())
    list(Notifier(of).post())
    assert [m["id"] for m in receiver.taken] == [*"bcdefg", *"bcdefg"]


def test_decisions_of_one_commit_are_passed_together(
    lake: StreamLake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    hours = [shift(FIRST, n) for n in range(4)]
    record(
        lake,
        *(
            decide(h, "accepted", 1, CUT, now, f"empty-{n}", served="batch")
            for n, h in enumerate(hours)
        ),
    )
    decided(lake, NEXT, "accepted", 2, "later")
    monkeypatch.setattr(webhook, "_AT_ONCE", 2)
    receiver.mode, receiver.after = 500, 2
    of = hooked(lake, receiver.url)
    assert notify(of) is False
    receiver.mode = "takes"
    assert notify(of) is True
    assert [m["id"] for m in receiver.taken] == [f"empty-{n}" for n in (0, 1, 0, 1, 2, 3)] + [
        "later"
    ]


def test_decisions_that_are_recorded_between_the_reads_of_the_ledger_are_posted(
    lake: StreamLake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided(lake, FIRST, "accepted", 1, "a")
    history = Ledger.history

    def meanwhile(self: Ledger, *wanted: Any) -> list[LedgerRow]:
        monkeypatch.undo()
        decided(lake, NEXT, "accepted", 1, "b")
        decided(lake, FIRST, "accepted", 2, "c")
        return history(self, *wanted)

    monkeypatch.setattr(Ledger, "history", meanwhile)
    of = hooked(lake, receiver.url)
    assert [p.id for _ in range(2) for p in Notifier(of).post()] == ["a", "b", "c"]


def test_a_new_receiver_gets_the_last_day_and_a_job_stops_in_time(
    lake: StreamLake, receiver: Receiver
) -> None:
    decided(lake, FIRST, "accepted", 1, "old", at=datetime.now(UTC) - timedelta(days=2))
    decided(lake, NEXT, "accepted", 1, "new")
    of = hooked(lake, receiver.url)
    assert list(Notifier(of).post(within=timedelta(0))) == []
    assert [p.id for p in Notifier(of).post()] == ["new"]
    # Another receiver has a position of its own.
    assert [p.id for p in Notifier(hooked(lake, f"{receiver.url}/other")).post()] == ["new"]


def test_messages_for_a_new_receiver_that_is_away_for_longer_than_a_day_wait(
    lake: StreamLake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided(lake, FIRST, "accepted", 1, "a", at=datetime.now(UTC) - timedelta(hours=20))
    of = hooked(lake, receiver.url)
    receiver.mode = 500
    assert notify(of) is False
    # As a day later: the decision is older than the first look.
    monkeypatch.setattr(webhook, "FIRST_LOOK", timedelta(hours=1))
    receiver.mode = "takes"
    assert [p.id for p in Notifier(of).post()] == ["a"]


def command(folder: Path, hook: dict[str, Any], name: str, *arguments: str) -> Any:
    """Run a command on the lake in the folder."""
    conf = folder / "conf"
    write_environment(conf, folder, **hook)
    stream = {
        "topic": "events",
        "table": "games.events",
        "format": "json",
        "schema": DDL,
        "key": "id",
    }
    (conf / "streams" / "events.yaml").write_text(yaml.safe_dump(stream))
    return CliRunner().invoke(main, [name, "events", *arguments, "--conf", str(conf)])


def test_the_command_posts_waiting_messages(
    lake: StreamLake, receiver: Receiver, tmp_path: Path
) -> None:
    a_days_decisions(lake)
    hook = {"webhook": {"url": receiver.url}}
    assert command(tmp_path, {}, "webhook").exit_code == ConfigurationError.exit_code
    receiver.mode, receiver.after = 503, 1
    failed = command(tmp_path, hook, "webhook", "--output", "json")
    assert failed.exit_code == Transient.exit_code
    assert [
        json.loads(line)["event"] for line in failed.stdout.splitlines() if line.startswith("{")
    ] == ["adopted"]
    receiver.mode = "takes"
    name, _ = words(printed("anabranch webhook STREAM", STREAM="events"))
    assert (
        command(tmp_path, hook, name)
        .stdout.splitlines()[0]
        .startswith(f"{FIRST}  accepted  revision 1  c")
    )
    decided(lake, NEXT, "accepted", 1, "h")
    assert command(tmp_path, hook, "webhook", "--skip").exit_code == 0
    assert "nothing to post" in command(tmp_path, hook, "webhook").stdout


def test_an_operators_choice_is_posted_by_the_command_that_made_it(
    receiver: Receiver, tmp_path: Path
) -> None:
    one = four_hours(tmp_path)
    accept(one, FIRST, 10)
    hook = {"webhook": {"url": receiver.url}}
    for layer in ("speed", "auto"):
        made = command(
            tmp_path, hook, "override", FIRST, "--layer", layer, "--why", "the rule is wrong"
        )
        assert made.exit_code == 0, made.output
    served = [m for m in receiver.taken if m["event"] == "served"]
    assert [(m["from"]["served"], m["to"]["served"]) for m in served] == [
        ("batch", "speed"),
        ("speed", "batch"),
    ]
