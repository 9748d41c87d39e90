"""The streams of the configuration folder, and their settings for the DAG files.

`ANABRANCH_CONF` names the folder (default: `conf` beside `dags`), whose files under `streams/`
define the streams. `ANABRANCH_ON_FAILURE` names the `on_failure_callback` of each task, as
`module.function`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator, Param
from anabranch_conf import (
    GRACE,
    OWNER,
    Mistake,
    StreamFile,
    group_in_file,
    names,
    parse_duration,
    parse_hour,
    parse_name,
    parse_target,
    read_stream_file,
)

CONF = Path(os.environ.get("ANABRANCH_CONF") or Path(__file__).resolve().parents[1] / "conf")
# A DAG's id has 250 characters at most.
_GROUP = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,149}")


@dataclass(frozen=True)
class Stream:
    """A stream, or a family of topics: the keys of its file that the DAGs need. With a `mistake`
    in one of them, all but `name`, `is_family` and `group` are defaults."""

    name: str
    is_family: bool
    group: str | None
    owner: str = OWNER
    start: datetime | None = None
    grace: timedelta = GRACE
    targets: tuple[str, ...] = ()
    mistake: str | None = None


@cache
def files() -> list[Stream]:
    """Return the streams and families of topics, sorted by name, without those whose name no DAG's
    id can have, such as `flights copy`; the commands report them."""
    found = [(name, kind) for name, kind in names(CONF) if re.fullmatch(r"[\w.-]{1,150}", name)]
    return [_read(name, is_family) for name, is_family in found]


def streams() -> list[Stream]:
    """Return the streams with a file of their own, sorted by name."""
    return [stream for stream in files() if not stream.is_family]


def groups() -> dict[str, list[Stream]]:
    """Return the streams and families of topics by group."""
    members: dict[str, list[Stream]] = {}
    for stream in files():
        if stream.group is not None:
            members.setdefault(stream.group, []).append(stream)
    return members


def _read(name: str, is_family: bool) -> Stream:
    try:
        file = read_stream_file(CONF, name, ("group", "airflow", "batch", "egress"))
        return Stream(
            name,
            is_family,
            group=file.value(["group"], _group, None),
            owner=file.value(["airflow", "owner"], _text, OWNER),
            start=file.value(["airflow", "start"], _instant, None),
            grace=file.value(["batch", "grace"], parse_duration, GRACE),
            targets=_targets(file),
        )
    except Mistake as mistake:
        # The stream's group keeps it, unless that is wrong too.
        group = group_in_file(name, CONF) or ""
        return Stream(
            name, is_family, group if _GROUP.fullmatch(group) else None, mistake=str(mistake)
        )


def _group(value: object) -> str:
    if not _GROUP.fullmatch(name := parse_name(value)):
        raise ValueError("expected 150 characters at most")
    return name


def _targets(file: StreamFile) -> tuple[str, ...]:
    count = file.value(["egress"], _length, 0)
    targets = [file.value(["egress", i, "name"], parse_target, "") for i in range(count)]
    if twice := next((name for name in targets if targets.count(name) > 1), None):
        raise Mistake(f"{file.path}: egress: expected each name once, found {twice!r} twice")
    return tuple(targets)


def _length(value: object) -> int:
    if not isinstance(value, list):
        raise ValueError("expected a list")
    return len(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value


def _instant(value: object) -> datetime:
    return datetime.strptime(parse_hour(value), "%Y-%m-%dT%H").replace(tzinfo=UTC)


def grace_task(streams: Iterable[Stream]) -> BaseOperator:
    """Return the task that waits out the longest `batch.grace` of the streams."""
    from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync

    seconds = int(max(stream.grace for stream in streams).total_seconds())
    end = f"data_interval_end + macros.timedelta(seconds={seconds})"
    return DateTimeSensorAsync(task_id="grace", target_time=f"{{{{ ({end}).isoformat() }}}}")


def dag_options(name: str, *streams: Stream) -> dict[str, Any]:
    """Return the options that all DAGs of streams share, but those that a DAG replaces. `name`: the
    stream's, or the group's. Owners are separated by commas."""
    callback = os.environ.get("ANABRANCH_ON_FAILURE")
    default_args = {
        "owner": ", ".join(sorted({stream.owner for stream in streams})),
        "depends_on_past": False,
        "retries": 8,
        "retry_delay": timedelta(minutes=1),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
        **({"on_failure_callback": _imported(callback)} if callback else {}),
    }
    return {
        "start_date": datetime(2026, 1, 1, tzinfo=UTC),
        "catchup": False,
        "max_active_runs": 1,
        "default_args": default_args,
        "tags": ["anabranch", name],
    }


def _imported(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def hour_params(with_accept: bool = True) -> dict[str, Param]:
    """Return the params of a manual run; `accept` only for the DAG of one stream."""
    params = {
        "hour": Param(
            None, type=["null", "string"], description="One hour, such as 2026-11-21T03 (UTC)."
        ),
        "restate": Param(
            False, type="boolean", description="Publish a new revision of an accepted hour."
        ),
        "accept": Param(
            False, type="boolean", description="Accept despite gaps or the quality gate; needs why."
        ),
        "why": Param(None, type=["null", "string"], description="The reason, for the ledger."),
    }
    if with_accept:
        return params
    return {name: param for name, param in params.items() if name != "accept"}
