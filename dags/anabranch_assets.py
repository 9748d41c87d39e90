"""The assets of authoritative hours, for the DAGs that consume them. Defines no DAG."""

from __future__ import annotations

from airflow.sdk import (
    Asset,
    DayWindow,
    IdentityMapper,
    PartitionedAssetTimetable,
    RollupMapper,
    StartOfDayMapper,
)


def hours_asset(stream: str) -> Asset:
    """Return the asset of the stream's authoritative hours: accepted, by batch, verified."""
    return Asset(
        name=f"anabranch_hours__{stream}", uri=f"anabranch://hours/{stream}", group="anabranch"
    )


def partitions_asset(stream: str) -> Asset:
    """Return the asset of the same event with the hour as `partition_key`. It is separate: Airflow
    starts no DAG with a plain asset schedule for an event with a partition key."""
    return Asset(
        name=f"anabranch_partitions__{stream}",
        uri=f"anabranch://partitions/{stream}",
        group="anabranch",
    )


def restated_days_asset(stream: str) -> Asset:
    """Return the asset whose event is a day with a new restatement, once all its hours are
    accepted. The day, such as 2026-11-21, is the `partition_key`."""
    name, uri = f"anabranch_restated_days__{stream}", f"anabranch://restated-days/{stream}"
    return Asset(name=name, uri=uri, group="anabranch")


def group_hours_asset(group: str) -> Asset:
    """Return the asset whose event is an hour that is complete in every stream of a group, with all
    earlier hours. The hour, such as 2026-11-21T03, is the `partition_key`."""
    return Asset(
        name=f"anabranch_group_hours__{group}",
        uri=f"anabranch://group-hours/{group}",
        group="anabranch",
    )


def day_schedule(stream: str) -> PartitionedAssetTimetable:
    """Return the schedule of a DAG that runs for each day of a stream: once all 24 hours are
    accepted, and again for each later restatement. The run's `partition_key` is the day."""
    hours, days = partitions_asset(stream), restated_days_asset(stream)
    whole_day = RollupMapper(
        upstream_mapper=StartOfDayMapper(input_format="%Y-%m-%dT%H"), window=DayWindow()
    )
    return PartitionedAssetTimetable(
        assets=hours | days, partition_mapper_config={hours: whole_day, days: IdentityMapper()}
    )
