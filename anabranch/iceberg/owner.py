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
from functools import partial
from typing import Any

from pyiceberg.table import Table

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import parse, read_property, read_stored, to_json
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake

OWNER = "anabranch.stream"

FORMAT = 1
"""The format of properties, ledger and dead letters that this version reads and writes."""


class AnotherStreamsTable(ConfigurationError):
    """The table that a stream's file names does not belong to that stream."""


@dataclass(frozen=True)
class Owner:
    """A table's stream, with its topic and cluster at the time, and the tables' format."""

    stream: str
    topic: str
    cluster_id: str
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(to_json(self))

    @staticmethod
    def from_json(text: str) -> Owner:
        """Raises Terminal for any text but that of `to_json`."""
        return read_stored(f"property {OWNER}", text, partial(parse, Owner))


def read_owner(table: Table) -> Owner | None:
    """Return a table's owner; None for a table that is no stream's table of rows. Raises
    ConfigurationError for a table of another format."""
    text = table.properties.get(OWNER)
    if text is None:
        return None
    properties = read_property(table.properties, OWNER, partial(parse, dict[str, Any]))
    found = properties.get("format", "none")
    if found != FORMAT:
        raise ConfigurationError(
            f"table {'.'.join(table.name())}: expected format {FORMAT} of Anabranch's tables, "
            f"found {found}, of another version; nothing was changed: install the version that "
            "wrote it"
        )
    return Owner.from_json(text)


def owner_of(table: Table) -> Owner:
    """Return the owner of a stream's table. Raises AnotherStreamsTable if it has none,
    ConfigurationError for a table of another format."""
    if (owner := read_owner(table)) is None:
        raise AnotherStreamsTable(
            f"table {'.'.join(table.name())}: expected a stream's table with property {OWNER}, "
            "found none: it is another program's table, or one beside a stream's; nothing was "
            "changed. Give `table:` of the stream's file another name"
        )
    return owner


def require_owner(stream: Stream, renamed_from: str | None = None) -> Callable[[str, Table], None]:
    """Return a check that raises AnotherStreamsTable if the stream's table has another owner than
    this stream or `renamed_from`, its earlier name, or none. Other tables pass."""

    def require(name: str, table: Table) -> None:
        if name != stream.table:
            return
        owner = owner_of(table)
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
