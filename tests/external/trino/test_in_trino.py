"""docs/how-to/query.md's questions in a real Trino, with Python's answers: `make test-trino`."""

from datetime import datetime
from pathlib import Path
from typing import Any

from query_page import queried_world, run_python, sections_of_page
from trino_server import running_trino
from world import Make, World

from anabranch.common.output import plain


def test_trino_gives_the_pages_answers(world: Make, tmp_path: Path) -> None:
    one, day = queried_world(world)
    sections = sections_of_page(one, day)
    expected = run_python(one, {"Python": sections["Python"]})["Python"]
    with running_trino(tmp_path, one.job.environment) as trino:
        answers = [trino.ask(sql) for sql in sections["Trino"]]
        promised = trino.ask(_properties(one))
    assert [[_comparable(row) for row in rows] for rows in answers] == expected
    assert [row for row in promised if row[0] == "anabranch.fresh-through"], promised


def _properties(one: World) -> str:
    schema, _, table = one.job.stream.table.rpartition(".")
    return (
        f'SELECT key, value FROM {one.job.environment.catalog.name}.{schema}."{table}$properties"'
    )


def _comparable(row: list[Any]) -> list[Any]:
    """Trino's times are text such as `2026-11-21 10:10:00.000000 UTC`."""
    return [plain(_as_time(value)) for value in row]


def _as_time(value: Any) -> Any:
    if isinstance(value, str) and value.endswith(" UTC"):
        return datetime.fromisoformat(value.replace(" UTC", "+00:00"))
    return value
