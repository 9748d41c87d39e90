"""`anabranch.open`: one stream's table, or the tables of a group as of an hour."""

from __future__ import annotations

from pathlib import Path
from typing import overload

from anabranch.common.errors import ConfigurationError
from serving_layer.reader.group import GroupTables, open_group
from serving_layer.reader.handle import StreamTable, open_table


@overload
def open_tables(
    stream: str,
    *,
    conf: str | Path | None = None,
    as_of: str | None = None,
    only_accepted: bool = False,
) -> StreamTable: ...


@overload
def open_tables(*, group: str, hour: str, conf: str | Path | None = None) -> GroupTables: ...


def open_tables(
    stream: str | None = None,
    *,
    group: str | None = None,
    hour: str | None = None,
    conf: str | Path | None = None,
    as_of: str | None = None,
    only_accepted: bool = False,
) -> StreamTable | GroupTables:
    """Return a stream's table (`serving_layer.reader.handle.open_table`), or the tables of a group
    as of an hour (`serving_layer.reader.group.open_group`). Raises ConfigurationError for any other
    combination of arguments."""
    if stream is not None and group is None and hour is None:
        return open_table(stream, conf=conf, as_of=as_of, only_accepted=only_accepted)
    if (
        stream is None
        and group is not None
        and hour is not None
        and as_of is None
        and not only_accepted
    ):
        return open_group(group, hour, conf=conf)
    raise ConfigurationError(
        "open: expected a stream, with as_of= or only_accepted= where needed, or group= and hour= "
        'alone, found another combination; for example anabranch.open("orders") or '
        'anabranch.open(group="small", hour="2026-11-21T03")'
    )
