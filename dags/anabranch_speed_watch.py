"""One DAG for each stream: it checks every five minutes whether the speed layer keeps up. Wiring
only."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG
from anabranch_operators import WatchOperator, reports_mistake
from anabranch_streams import Stream, dag_options, streams

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
        **dag_options(name, stream),
    ) as dag:
        if reports_mistake(stream):
            return dag
        retried = {"retries": 1, "retry_delay": timedelta(seconds=30)}
        arguments = ["status", name, "--late-after", LATE]
        WatchOperator(task_id="watch", arguments=arguments, **retried)
    return dag


for _stream in streams():
    globals()[f"anabranch_speed_watch__{_stream.name}"] = watch_dag(_stream)
