"""The streams of a configuration folder, and whether each has its table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from anabranch import config

StreamState = Literal["ready", "new", "gone", "broken", "unknown"]


@dataclass(frozen=True)
class StreamSummary:
    """A stream as its file declares it. `state`: `ready` has its table; `new` waits for `anabranch
    apply`; of `gone`, Kafka no longer has the topic; of `broken`, `error` is what is wrong with the
    file; of `unknown`, why the catalog did not answer. `family`: the family that the stream is
    of."""

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
    shared: Mapping[str, config.ConfigurationError],
    tables: Collection[str] | str,
    members: config.Members,
) -> list[StreamSummary]:
    """A line for each stream. `groups`: the group of each broken file; `shared`: the error of each
    whose table is another's too; `tables`: the catalog's tables, or why they are not known;
    `members`: the streams of families. Pure."""
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
        if name in shared:
            state, error = "broken", str(shared[name])
        elif isinstance(tables, str):
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
