"""One DAG for each group: one Spark job rebuilds an hour of all its streams; a mapped task for each
stream shows its result.

Wiring only: every task runs `anabranch` commands that an operator can run by hand.
"""

from __future__ import annotations

from airflow.sdk import DAG, CronDataIntervalTimetable
from anabranch_operators import (
    AnabranchOperator,
    BacklogOperator,
    FamilyOperator,
    GroupHourOperator,
    GroupRebuildOperator,
    StreamOfGroupOperator,
    reports_mistake,
)
from anabranch_streams import Stream, dag_options, grace_task, groups, hour_params

DOC = """\
Each hour of the streams with `group: {group}`, in UTC, as soon as it has ended:

- **grace** waits out the longest `batch.grace` of them without a worker.
- **rebuild** seals and rebuilds the hour of every stream in one Spark job, and first up to 24
  earlier hours of each that wait. Refusals and failures of
  streams do not fail it.
- **stream**, mapped, one for each stream: fails as the stream's rebuild did, with the reason in its
  log and in its XCom `refused`; else it merges and verifies the hour, and notifies the consumers of
  the stream's assets. After a transient failure it rebuilds its stream by itself.
- **egress__STREAM__TARGET** delivers to a target of a stream's file all accepted hours that it
  lacks; of a family's file, those of each of its streams.
- **accepted** fails the run when a stream failed; else it notifies the consumers of the asset
  `anabranch_group_hours__{group}`. Skipped while an earlier hour of a stream waits.
- **backlog** fails while an earlier hour of a stream waits.
- **configuration__STREAM** fails with the mistake in a stream's file, if there is one.

To run an hour again: clear **rebuild** with its downstream tasks for all streams, or one mapped
**stream** for that stream alone; an accepted hour is restated then. To accept a refused hour as it
is: trigger `anabranch_hourly__STREAM` with `hour`, `accept` and `why`.
"""


def group_dag(group: str, members: list[Stream]) -> DAG:
    """Return the DAG of one group; its data interval is the hour."""
    options = dag_options(group, *members)
    if starts := [member.start for member in members if member.start is not None]:
        options |= {"start_date": min(starts), "catchup": True}
    with DAG(
        dag_id=f"anabranch_hourly_group__{group}",
        description=f"Rebuilds and verifies each hour of the {len(members)} streams of group "
        f"{group}.",
        doc_md=DOC.format(group=group),
        schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
        params=hour_params(with_accept=False),
        **options,
    ) as dag:
        wait = grace_task(members)
        rebuild = GroupRebuildOperator(task_id="rebuild", group=group)
        mapped = StreamOfGroupOperator.partial(
            task_id="stream", map_index_template="{{ task.stream }}"
        )
        each = mapped.expand(outcome=rebuild.output)
        # With the default trigger rule, `accepted` would be skipped and the run would succeed if
        # one stream is skipped and another fails.
        (
            wait
            >> rebuild
            >> each
            >> GroupHourOperator(
                task_id="accepted", group=group, trigger_rule="none_failed_min_one_success"
            )
        )
        each >> BacklogOperator(
            task_id="backlog", arguments=["--group", group], trigger_rule="all_done"
        )
        for member in members:
            if not reports_mistake(member, f"configuration__{member.name}"):
                for target in member.targets:
                    each >> _egress(member, target)
    return dag


def _egress(member: Stream, target: str) -> AnabranchOperator:
    """Return the task that delivers the hours of a stream, or of each stream of a family."""
    kwargs = {
        "task_id": f"egress__{member.name}__{target}",
        "trigger_rule": "all_done",
        "owner": member.owner,
    }
    if member.is_family:
        arguments = ["egress", "STREAM", "--target", target]
        return FamilyOperator(family=member.name, arguments=arguments, **kwargs)
    return AnabranchOperator(arguments=["egress", member.name, "--target", target], **kwargs)


for _group, _members in groups().items():
    globals()[f"anabranch_hourly_group__{_group}"] = group_dag(_group, _members)
