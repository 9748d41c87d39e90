"""Examples: DAGs that start when an hour of a stream, or all hours of a day, are authoritative.
Replace their tasks by your own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, task
from anabranch_assets import day_schedule, hours_asset

_ASSET = hours_asset("game_events")
_ALIKE: dict[str, Any] = {
    "start_date": datetime(2026, 1, 1, tzinfo=UTC),
    "catchup": False,
    "tags": ["anabranch", "example"],
}

with DAG(
    dag_id="anabranch_example_consumer",
    description="Prints the hours of game_events that became authoritative.",
    doc_md="Each event's extra says `hour`, `revision`, `rows` and `snapshot_id`; a restated hour "
    "comes again.",
    schedule=[_ASSET],
    **_ALIKE,
) as anabranch_example_consumer:

    @task
    def read_hours(triggering_asset_events: Any = None) -> list[dict[str, Any]]:
        extras = [dict(event.extra) for event in triggering_asset_events[_ASSET]]
        for extra in extras:
            print(f"hour {extra['hour']}, revision {extra['revision']}: {extra['rows']} rows")
        return extras

    read_hours()

with DAG(
    dag_id="anabranch_example_daily",
    description="Prints which days of game_events became authoritative.",
    doc_md="Runs for a day once all its 24 hours are accepted, and again after one of them is "
    "restated.",
    schedule=day_schedule("game_events"),
    **_ALIKE,
) as anabranch_example_daily:

    @task
    def summarize_day(dag_run: Any = None) -> str:
        print(f"day {dag_run.partition_key}: all hours are accepted")
        return str(dag_run.partition_key)

    summarize_day()
