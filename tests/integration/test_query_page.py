"""docs/how-to/query.md: each engine gives the same three answers to the page's own code."""

import shlex
from typing import Any

import pytest
from commands import shown
from query_page import queried_world, run_python, sections_of_page
from world import Make

from anabranch.common.output import plain

_IN_PYTHON, _TOPIC = ("Python", "DuckDB", "PyIceberg"), "Rows, then the topic"


@pytest.mark.full
def test_every_engine_gives_the_pages_answers(world: Make) -> None:
    one, day = queried_world(world)
    sections = sections_of_page(one, day)
    assert list(sections) == [
        "Command line", "Python", "Rows, then the topic", "DuckDB", "PyIceberg", "Spark SQL",
        "Trino", "Athena (not executed)",
    ]  # fmt: skip

    python = {title: sections[title] for title in (*_IN_PYTHON, _TOPIC)}
    answers: dict[str, Any] = run_python(one, python)
    assert answers.pop(_TOPIC) == [[[len(one.rows())]]]
    commands = [shlex.split(line)[2:] for line in sections["Command line"][0].splitlines()]
    answers["Command line"] = [
        [list(row.values()) for row in shown(one, *command)] for command in commands
    ]
    frames = [one.spark.sql(sql).toArrow().to_pylist() for sql in sections["Spark SQL"]]
    answers["Spark SQL"] = [[[plain(v) for v in r.values()] for r in rows] for rows in frames]

    by_hand = answers["Command line"]
    assert [len(rows) for rows in by_hand][:2] == [1, 3] and len(by_hand[2]) >= 2, by_hand
    assert by_hand[0] == [[sum(1 for row in one.rows() if row["ingest_hour"] == f"{day}T10")]]
    players = {row[0] for row in by_hand[2]}
    assert {"x1", "x2"} <= players and "x3" not in players
    assert answers == dict.fromkeys(answers, by_hand)
