"""Hours in every state, as reports and the status page show them."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from lakes import StreamLake, decide
from proofs import BEFORE, CUT, HOUR, NEXT, NOW, accept, bury, event, read, record, stage_rows

from anabranch import iceberg, protocol
from anabranch.iceberg.manifests import content_by_hour
from anabranch.offsets.position import Topic
from anabranch.protocol.acts import hold
from anabranch.protocol.retention import plan_expire
from anabranch.protocol.state import Accepted

LATER = NOW + timedelta(minutes=30)

_FAILED = {
    "type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n"},
    "severity": "critical", "observed": [None], "unexpected_count": 1, "element_count": 4,
    "rows": [{"partition": 0, "offset": 4, "values": {"n": None}}],
    "message": "n: expected to not be null, found 1 of 4 rows otherwise",
}  # fmt: skip
_QUALITY = {
    "passed": False,
    "failed": [_FAILED],
    "warnings": [_FAILED | {"severity": "warning"}],
    "evaluated": 3,
    "suite": "events",
    "met": [{"type": "expect_column_to_exist", "kwargs": {"column": "n"}, "severity": "critical"}],
    "not_applicable": [{"type": "expect_column_to_exist", "reason": "nothing is known"}],
}
ACCOUNT = {
    "offsets": 6,
    "good": 3,
    "dead": 1,
    "duplicate": 1,
    "gap": 1,
    "gaps": {"control": 1},
    "partitions": {
        "0": {"offsets": 6, "good": 3, "dead": 1, "duplicate": 1, "gaps": {"control": 1}},
        "1": {"offsets": 0, "good": 0, "dead": 0, "duplicate": 0, "gaps": {}},
    },
    "sources": {"kafka": 4, "speed": 1},
    "speed_rows": 5,
    "diff": {
        "missing": 2, "extra": 1, "changed": 1, "duplicate": 1, "unread": 1,
        "sample": [{"kind": "changed", "partition": 0, "offset": 7}],
    },
    "quality": _QUALITY,
    "unknown": {
        "records": 2,
        "others": 3,
        "fields": [
            {
                "name": "colour", "records": 2, "first": [0, 4], "last": [0, 7], "sample": '"aaaa"',
                "type": "STRING",
            },
            {"name": "<b>\x1b", "records": 1, "first": [0, 7], "last": [0, 7]},
        ],
    },
}  # fmt: skip


def kafka() -> Any:
    return SimpleNamespace(
        close=lambda: None,
        describe=lambda name, confirmed: None if confirmed else Topic(name, "t", (0, 1)),
        stable_ends=lambda topic: {0: 12, 1: 3},
        retention=lambda topic: timedelta(days=7),
        oldest_stamp=lambda topic, starts, ends, low, high: int(NOW.timestamp() * 1000),
    )


def sealed(one: StreamLake) -> None:
    record(one, decide(HOUR, "sealed", 0, BEFORE, NOW, "a", served="speed"))
    why = "sealed by adopting topic id t"
    record(one, decide(NEXT, "sealed", 0, CUT, NOW, "b", served="speed", reason=why))


def accepted(one: StreamLake, rows: list[dict[str, Any]], revision: int, **facts: Any) -> None:
    """Publish and record an acceptance of NEXT. Its dead letter is at offset 6."""
    one.land(one.accept(stage_rows(one, rows), NEXT, Accepted(revision, CUT)))
    record(one, decide(NEXT, "accepted", revision, CUT, NOW, served="batch", **facts))


def a_full_hour(one: StreamLake) -> None:
    """Every column has a value; a restatement is refused; another decision waits."""
    sealed(one)
    before = [event(0, o, HOUR) for o in range(4)]
    speed = [event(0, 4), event(0, 5, id="0-2"), event(0, 7, n=1), event(0, 8)]
    read(one, [*before, *speed], {0: 10})
    accept(one, HOUR, BEFORE, before, snapshot_id=5, sources={"kafka": 4})
    refused = {"served": "speed", "reason": "quality: no"} | ACCOUNT
    record(one, decide(NEXT, "refused", 1, CUT, NOW, "c", **refused))
    rows = [event(0, 4), event(0, 7, n=2), event(0, 9)]
    accepted(one, rows, 1, snapshot_id=6, reason="accepted by choice: yes", **ACCOUNT)
    bury(one, [(NEXT, 0, 6)])
    more = {"good": 2, "gap": 2, "gaps": {"control": 1, "aborted": 1}, "sources": {"kafka": 4}}
    accepted(one, rows[:2], 2, **(ACCOUNT | more))
    refused = {"served": "batch", "reason": "quality: again"} | ACCOUNT
    record(one, decide(NEXT, "refused", 3, CUT, LATER, "d", **refused))
    protocol.acts.serve_hour(one.publisher, HOUR, "speed", "the rule is wrong")
    waits = decide(HOUR, "served", 1, BEFORE, LATER, "e", served="speed", reason="still")
    one.change(iceberg.commits.Change("main"), decisions=(waits,))


def an_old_hour(one: StreamLake) -> None:
    """An hour accepted with differences and no expectations, one refused and partly lost."""
    sealed(one)
    read(one, [event(0, o, HOUR) for o in range(4)], {0: 7})
    old = {
        "diff": {"missing": 2, "extra": 0, "changed": 1, "duplicate": 0, "unread": 1},
        "quality": {"passed": True, "failed": []},
        "speed_rows": 4,
    }
    accept(one, HOUR, BEFORE, [event(0, o, HOUR) for o in range(4)], duplicate=2, **old)
    lost = {"good": 4, "dead": 0, "duplicate": 0, "gap": 2, "gaps": {"retention": 2}}
    record(one, decide(NEXT, "refused", 1, CUT, NOW, "c", served="speed", reason="gaps", **lost))
    record(one, decide(NEXT, "refused", 1, CUT, LATER, "d", served="speed", reason="gaps again"))


def an_expired_hour(one: StreamLake) -> None:
    """Two accepted hours: the older has expired, and an operator holds the newer."""
    a_full_hour(one)
    state = one.state()
    speed_hours = content_by_hour(state.table, "speed")
    why = "kept for 2 days (keep.rows)"
    one.land(plan_expire(state, [HOUR], speed_hours, {HOUR: 1}, why, "gone", LATER), state)
    hold(one.publisher, NEXT, NEXT, "case 7")


def nothing_yet(one: StreamLake) -> None:
    """No row of the ledger at all."""
