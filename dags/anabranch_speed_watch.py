"""One DAG for each stream: it checks every five minutes whether the speed layer keeps up. Wiring
only.

If the stream's file has the command `airflow.speed_restart`, the DAG runs it to restart a late
speed layer. Two speed layers at once are safe, since only one of them publishes. Without the
command, the run fails and triggers its alerts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from anabranch_operators import WatchOperator, reports_mistake
from anabranch_streams import Stream, default_args, streams

DOC = """\
Fails, or runs `airflow.speed_restart`, when records of `{stream}` wait and the speed layer has
published nothing for `airflow.speed_late_after` ({late}). The hours are served by the batch layer
meanwhile. Its progress: `anabranch status {stream}`.
"""


def watch_dag(stream: Stream) -> DAG:
    """Return the DAG of one stream."""
    name, late = stream.name, f"{stream.late_after.total_seconds():.0f} seconds"
    with DAG(
        dag_id=f"anabranch_speed_watch__{name}",
        description=f"Checks that the speed layer of {name} keeps up.",
        doc_md=DOC.format(stream=name, late=late),
        schedule="*/5 * * * *",
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args=default_args(stream) | {"retries": 1, "retry_delay": timedelta(seconds=30)},
        tags=["anabranch", name],
    ) as dag:
        if reports_mistake(stream):
            return dag
        watch = WatchOperator(
            task_id="watch",
            arguments=["status", name, "--late-after", late],
            restarts=stream.restart is not None,
        )
        if stream.restart is not None:
            watch >> BashOperator(task_id="restart", bash_command=f"{stream.restart}\n")
    return dag


for _stream in streams():
    globals()[f"anabranch_speed_watch__{_stream.name}"] = watch_dag(_stream)
