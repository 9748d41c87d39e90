"""tests/gameday/game-day.md names alerts, findings and commands that exist; `make game-day`
compares what is seen."""

from __future__ import annotations

import run_books
from game_day_page import FILE, Observed, Seen, render, skeletons
from test_run_books import ALERTS

from anabranch.operations.doctor.finding import Issue

FAULTS = [
    "Late hour",
    "Drift",
    "Gate fails",
    "Poison record",
    "Broker down",
    "S3 slow",
    "Catalog locked",
    "Clock off",
    "Disk full",
    "Retention near",
    "Zombie",
    "Topic recreated",
]


def test_the_page_names_existing_keys() -> None:
    reported = skeletons(FILE.read_text(encoding="utf-8"))
    assert [fault for fault, _, _ in reported] == FAULTS
    seen = [(where, name) for _, places, _ in reported for where, name in places]
    assert {name for where, name in seen if where == "alert"} <= ALERTS.keys()
    assert {name for where, name in seen if where == "terminal"} <= {
        *map(str, Issue),
        "dead letters",
        "drift",
    }
    assert {command for _, _, command in reported if command} <= run_books.commands()
    assert all({"terminal", "alert"} <= {where for where, _ in places} for _, places, _ in reported)


def test_a_page_that_is_written_is_read_again() -> None:
    made = [
        Observed(
            "A fault",
            "It is done.",
            [Seen("page", "away", 1.2, "away\nwhy"), Seen("alert", "A", 3, "s")],
            "c d",
            "",
            5,
        ),
        Observed(
            "Another, of 2",
            "It is done.",
            [Seen("terminal", "x.y", 2, "text")],
            "",
            "others fix it",
            6,
        ),
    ]
    assert skeletons(render(made, ["lost 0"], 20, 9.6)) == [one.skeleton for one in made]
