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


def _asset(kind: str, of: str) -> Asset:
    uri = f"anabranch://{kind.replace('_', '-')}/{of}"
    return Asset(name=f"anabranch_{kind}__{of}", uri=uri, group="anabranch")


def hours_asset(stream: str) -> Asset:
    """Return the asset of the stream's authoritative hours: accepted, by batch, verified."""
    return _asset("hours", stream)


def partitions_asset(stream: str) -> Asset:
    """Return the asset of the same event with the hour as `partition_key`. It is separate: Airflow
    starts no DAG with a plain asset schedule for an event with a partition key."""
    return _asset("partitions", stream)


def restated_days_asset(stream: str) -> Asset:
    """Return the asset whose event is a day with a new restatement, once all its hours are
    accepted. The day, such as 2026-11-21, is the `partition_key`."""
    return _asset("restated_days", stream)


def group_hours_asset(group: str) -> Asset:
    """Return the asset whose event is an hour that is complete in every stream of a group, with all
    earlier hours. The hour, such as 2026-11-21T03, is the `partition_key`."""
    return _asset("group_hours", group)


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
