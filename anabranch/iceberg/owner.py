"""The owner of a table: a stream, recorded in a table property and checked whenever the table is
opened for a stream.

Two streams whose files name the same table would publish into it in turn, each with its own topic's
offsets. So `apply` writes the stream's name into its table, and opening the table for another
stream fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import from_json, to_json
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake

if TYPE_CHECKING:
    from pyiceberg.table import Table

OWNER = "anabranch.stream"


class AnotherStreamsTable(ConfigurationError):
    """The table that a stream's file names belongs to another stream."""


@dataclass(frozen=True)
class Owner:
    """The stream that owns a table, with its topic and cluster when it was recorded."""

    stream: str
    topic: str
    cluster_id: str = ""

    def to_json(self) -> str:
        return json.dumps(to_json(self))

    @staticmethod
    def from_json(text: str) -> Owner:
        return from_json(Owner, json.loads(text))


def read_owner(table: Table) -> Owner | None:
    """Return a table's owner; None for a table of an older version."""
    text = table.properties.get(OWNER)
    return Owner.from_json(text) if text else None


def require_owner(stream: Stream, renamed_from: str | None = None) -> Callable[[str, Table], None]:
    """Return a check that raises AnotherStreamsTable if the stream's table has an owner other than
    this stream or `renamed_from`, its earlier name. Other tables pass."""

    def require(name: str, table: Table) -> None:
        if name != stream.table or (owner := read_owner(table)) is None:
            return
        # The name decides, not the topic (decision 37): `topic:` may change, and a recreated topic
        # looks like another stream's.
        if owner.stream in (stream.name, renamed_from):
            return
        raise AnotherStreamsTable(
            f"streams/{stream.name}.yaml: table {name}: expected a table of stream {stream.name}, "
            f"found that it belongs to stream {owner.stream} (streams/{owner.stream}.yaml, topic "
            f"{owner.topic}); nothing was changed. Give `table:` of streams/{stream.name}.yaml "
            f"another name. If streams/{owner.stream}.yaml was renamed to it: see --renamed-from "
            "of `anabranch apply`"
        )

    return require


def open_lake(
    environment: Environment,
    stream: Stream,
    renamed_from: str | None = None,
    shared: Lake | None = None,
) -> Lake:
    """Return the catalog for one stream, which refuses its table if another stream owns it
    (AnotherStreamsTable). `shared`: a Lake whose catalog client is reused."""
    return Lake(environment, require_owner(stream, renamed_from), shared)
