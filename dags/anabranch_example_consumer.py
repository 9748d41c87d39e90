"""Example: a DAG that starts when an hour of a stream is authoritative. Replace its task by your
own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, task
from anabranch_assets import hours_asset

_ASSET = hours_asset("game_events")

with DAG(
    dag_id="anabranch_example_consumer",
    description="Prints the hours of game_events that became authoritative.",
    doc_md="Each event's extra says `hour`, `revision`, `rows` and `snapshot_id`; a restated hour "
    "comes again.",
    schedule=[_ASSET],
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    tags=["anabranch", "example"],
) as anabranch_example_consumer:

    @task
    def read_hours(triggering_asset_events: Any = None) -> list[dict[str, Any]]:
        extras = [dict(event.extra) for event in triggering_asset_events[_ASSET]]
        for extra in extras:
            print(f"hour {extra['hour']}, revision {extra['revision']}: {extra['rows']} rows")
        return extras

    read_hours()
