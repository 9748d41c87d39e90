"""The streams of a configuration folder with their states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from anabranch import config

StreamState = Literal["ready", "new", "gone", "broken", "unknown"]


@dataclass(frozen=True)
class StreamSummary:
    """A stream as its file declares it. `state`: `ready` (its table exists), `new` (before
    `anabranch apply`), `gone` (Kafka no longer has the topic), `broken` (its file is invalid) or
    `unknown` (the catalog did not answer). `error`: the reason for the last three. `family`: the
    stream's family, if any."""

    stream: str
    family: str | None
    group: str | None
    topic: str | None
    table: str | None
    state: StreamState
    error: str | None


def namespaces_of(selected: config.Selected) -> list[str]:
    return sorted({stream.table.rpartition(".")[0] for stream in config.loaded(selected)})


def summarize(
    selected: config.Selected,
    groups: Mapping[str, str | None],
    tables: Collection[str] | str,
    members: config.Members,
) -> list[StreamSummary]:
    """Return a summary of each stream. `groups`: the group of each stream with an invalid file;
    `tables`: the catalog's tables, or why they could not be listed; `members`: the streams of
    families. Pure."""
    made = []
    for name, found in selected.items():
        member = members.get(name)
        family = member.family if member is not None else None
        if isinstance(found, config.ConfigurationError):
            group, topic = (
                (member.group, member.topic) if member is not None else (groups.get(name), None)
            )
            made.append(StreamSummary(name, family, group, topic, None, "broken", str(found)))
            continue
        state: StreamState = "new"
        error = None
        if isinstance(tables, str):
            state, error = "unknown", tables
        elif member is not None and member.is_gone:
            state, error = (
                "gone",
                f"Kafka no longer has topic {found.topic}; the stream and its tables stay",
            )
        elif found.table in tables:
            state = "ready"
        made.append(
            StreamSummary(name, family, found.group, found.topic, found.table, state, error)
        )
    return made
