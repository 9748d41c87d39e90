"""One DAG for each stream: it seals, rebuilds, merges and verifies each hour once it has ended.

Wiring only: every task is one `anabranch` command that an operator can run by hand. The DAG of a
stream with `group:` has no schedule and is for manual runs: its group's DAG runs the hours
(anabranch_hourly_group.py).
"""

from __future__ import annotations

from airflow.sdk import DAG, CronDataIntervalTimetable
from anabranch_operators import (
    AnabranchOperator,
    BacklogOperator,
    RebuildOperator,
    SealOperator,
    VerifyOperator,
    reports_mistake,
)
from anabranch_streams import Stream, dag_options, grace_task, hour_params, streams

DOC = """\
Each hour of the stream `{stream}`, in UTC, as soon as it has ended:

- **grace** waits out `batch.grace` without holding a worker.
- **seal** decides the hour's cut. An hour before the stream's first is skipped.
- **rebuild** first rebuilds up to 24 earlier hours that wait, such as those of a time in which the
  DAG was paused, oldest first. Then it reads the hour's cut from Kafka, closes the balance, asks
  the quality gate, and publishes. After a refusal it fails without a retry; its log and its XCom
  `refused` have the reason. The hour is served as before, and the next hour is not delayed.
- **merge** corrects hours that the wrong layer serves, also after a refusal.
- **verify** counts the hour again from its files, and notifies the consumers of its assets:
  `anabranch_hours__{stream}`, `anabranch_partitions__{stream}` with the hour as `partition_key`,
  and of a restated hour `anabranch_restated_days__{stream}`.
- **backlog** fails while an earlier hour waits.
- **egress__NAME**, for each target of the stream's file: delivers to it all accepted hours that it
  lacks, this one and others.

More on an hour: `anabranch explain {stream} HOUR`. To run it again: clear `rebuild` with its
downstream tasks; an hour that was accepted is restated then, and by a backfill too. To accept it
despite gaps or the quality gate: trigger the DAG with `hour`, `accept` and `why`.
"""


def stream_dag(stream: Stream) -> DAG:
    """Return the DAG of one stream; its data interval is the hour."""
    name, options = stream.name, dag_options(stream.name, stream)
    # With `airflow.start`, Airflow runs a backlog, oldest first; else `anabranch batch` does.
    if stream.start is not None:
        options |= {"start_date": stream.start, "catchup": True}
    with DAG(
        dag_id=f"anabranch_hourly__{name}",
        description=f"Seals, rebuilds, merges and verifies each hour of {name}.",
        doc_md=DOC.format(stream=name),
        schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC")
        if stream.group is None
        else None,
        params=hour_params(),
        **options,
    ) as dag:
        if reports_mistake(stream):
            return dag
        wait = grace_task([stream])
        seal = SealOperator(task_id="seal", stream=name)
        rebuild = RebuildOperator(task_id="rebuild", stream=name)
        merge = AnabranchOperator(
            task_id="merge", arguments=["merge", name], trigger_rule="all_done"
        )
        # Leaf tasks determine the state of a run. merge succeeds also after a failure of seal or
        # rebuild; verify does not, so the run fails.
        verify = VerifyOperator(task_id="verify", stream=name)
        wait >> seal >> rebuild >> merge >> verify
        [seal, rebuild] >> verify
        verify >> BacklogOperator(task_id="backlog", arguments=[name])
        for target in stream.targets:
            arguments = ["egress", name, "--target", target]
            verify >> AnabranchOperator(task_id=f"egress__{target}", arguments=arguments)
    return dag


for _stream in streams():
    globals()[f"anabranch_hourly__{_stream.name}"] = stream_dag(_stream)
