"""Example: a DAG that starts when all hours of a day are authoritative. Replace its task by your
own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, task
from anabranch_assets import day_schedule

with DAG(
    dag_id="anabranch_example_daily",
    description="Prints which days of game_events became authoritative.",
    doc_md="Runs for a day once all its 24 hours are accepted, and again after one of them is "
    "restated.",
    schedule=day_schedule("game_events"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    tags=["anabranch", "example"],
) as anabranch_example_daily:

    @task
    def summarize_day(dag_run: Any = None) -> str:
        print(f"day {dag_run.partition_key}: all hours are accepted")
        return str(dag_run.partition_key)

    summarize_day()
