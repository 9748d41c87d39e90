"""One DAG for each stream: it checks every five minutes whether the speed layer keeps up. Wiring
only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG
from anabranch_operators import WatchOperator, reports_mistake
from anabranch_streams import Stream, default_args, streams

LATE = "10 minutes"
DOC = """\
Fails when records of `{stream}` wait and the speed layer has published nothing for {late}, and when
jobs refuse its topic. The batch layer serves the hours meanwhile. Its progress:
`anabranch status {stream}`.
"""


def watch_dag(stream: Stream) -> DAG:
    name = stream.name
    with DAG(
        dag_id=f"anabranch_speed_watch__{name}",
        description=f"Checks that the speed layer of {name} keeps up.",
        doc_md=DOC.format(stream=name, late=LATE),
        schedule="*/5 * * * *",
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args=default_args(stream) | {"retries": 1, "retry_delay": timedelta(seconds=30)},
        tags=["anabranch", name],
    ) as dag:
        if reports_mistake(stream):
            return dag
        WatchOperator(task_id="watch", arguments=["status", name, "--late-after", LATE])
    return dag


for _stream in streams():
    globals()[f"anabranch_speed_watch__{_stream.name}"] = watch_dag(_stream)
