"""Events of many dates in one hour: nothing bounds them here, and they share one task."""

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta

from world import Make, World, event, past_hour

from anabranch.iceberg.manifests import files_of
from anabranch.offsets.hours import start_of

DATES = 80


def dates_by_task(one: World, branch: str, hour: str) -> dict[str, list[str]]:
    """The event dates of each writing task's files, in the order in which they were opened."""
    by_task: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in files_of(one.state.table, branch, hour):
        task, _, number = file.file_path.rpartition("-")
        by_task[task].append((number, str(file.partition[0])))
    return {task: [date for _, date in sorted(files)] for task, files in by_task.items()}


def test_events_of_many_dates_are_written_a_date_at_a_time_by_both_layers(world: Make) -> None:
    one, hour = world(event_time={"column": "event_time"}, partitions=1), past_hour(1)
    days = [datetime(1990, 1, 1, tzinfo=UTC) + timedelta(days=31 * i) for i in range(DATES)] * 2
    random.Random(3).shuffle(days)
    at = start_of(hour) + timedelta(minutes=5)
    one.serve([(0, at + timedelta(seconds=i), event(f"e-{i}", day)) for i, day in enumerate(days)])
    assert one.contents() == one.acknowledged()
    tasks = dates_by_task(one, "speed", hour)
    assert sum(map(len, tasks.values())) >= DATES
    # With a file open for each, they would be in the order in which the dates came.
    assert all(dates == sorted(dates) for dates in tasks.values())
    [result] = one.batch(hour)
    assert result.decision == "accepted"
    assert one.contents() == one.acknowledged()
    assert all(dates == sorted(dates) for dates in dates_by_task(one, "main", hour).values())
