"""The streams of a configuration folder, and whether each has its table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from anabranch import config
from anabranch.common.output import print_json, print_table

StreamState = Literal["ready", "new", "broken", "unknown"]


@dataclass(frozen=True)
class StreamSummary:
    """A stream as its file declares it. `state`: `ready` has its table; `new` waits for `anabranch apply`; of `broken`,
    `error` is what is wrong with the file; of `unknown`, why the catalog did not answer."""

    stream: str
    group: str | None
    topic: str | None
    table: str | None
    state: StreamState
    error: str | None


def namespaces_of(selected: config.Selected) -> list[str]:
    """The namespaces of the streams' tables. Pure."""
    return sorted({stream.table.rpartition(".")[0] for stream in config.loaded(selected)})


def summarize(
    selected: config.Selected,
    groups: Mapping[str, str | None],
    shared: Mapping[str, config.ConfigurationError],
    tables: Collection[str] | str,
) -> list[StreamSummary]:
    """A line for each stream. `groups`: the group of each broken file; `shared`: the error of each whose table is
    another's too; `tables`: the catalog's tables, or why they are not known. Pure."""
    return [_summary(name, found, groups.get(name), shared.get(name), tables) for name, found in selected.items()]


def _summary(
    name: str,
    found: config.Stream | config.ConfigurationError,
    group: str | None,
    shared: config.ConfigurationError | None,
    tables: Collection[str] | str,
) -> StreamSummary:
    if isinstance(found, config.ConfigurationError):
        return StreamSummary(name, group, None, None, "broken", str(found))
    state: StreamState
    error = None
    if shared is not None:
        state, error = "broken", str(shared)
    elif isinstance(tables, str):
        state, error = "unknown", tables
    else:
        state = "ready" if found.table in tables else "new"
    return StreamSummary(name, found.group, found.topic, found.table, state, error)


def print_streams(views: Sequence[StreamSummary], output: str) -> None:
    """Print the streams: a table, or a list of objects."""
    if output == "json":
        print_json(views)
        return
    rows = [(v.stream, v.group, v.topic, v.table, v.state, v.error) for v in views]
    print_table(("stream", "group", "topic", "table", "state", "error"), rows)
