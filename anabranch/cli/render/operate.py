"""Print the results of commands that change something."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.render import print_result
from anabranch.common.output import print_json
from anabranch.offsets.position import ranges_to_keys, size, to_keys
from anabranch.protocol.holds import span_words

if TYPE_CHECKING:
    from anabranch.common.errors import AnabranchError
    from anabranch.config import Members, Stream
    from anabranch.protocol.holding import Held
    from anabranch.protocol.merge import Merged
    from anabranch.protocol.override import Served
    from anabranch.protocol.topic_change import Adopted


def print_new_streams(new: Sequence[Stream], members: Members, count: int) -> None:
    """Print the streams of families that have no table yet. `count`: all streams of families."""
    if new:
        print(f"families: {len(new)} new of {count} streams")
    for stream in new:
        family = members[stream.name].family
        print(f"family {family}: topic {stream.topic}: stream {stream.name}, table {stream.table}")


def print_changes(stream: str, changes: Iterable[str]) -> None:
    for change in changes:
        print(f"{stream}: {change}", flush=True)


def print_applied(
    streams: Iterable[str], done: Mapping[str, list[str]], errors: Mapping[str, AnabranchError]
) -> None:
    """Print the changes and the error of each stream as JSON."""
    found = {name: str(error) for name, error in errors.items()}
    print_json([{"stream": n, "changes": done.get(n, []), "error": found.get(n)} for n in streams])


def print_served(stream: str, hour: str, served: Served, output: str) -> None:
    view = {
        "hour": hour,
        "served": served.layer,
        "override": served.override,
        "changed": served.changed,
    }
    chosen = "by choice" if served.override else "by the rule"
    line = (
        f"{stream}: {hour} is {'now ' if served.changed else ''}served by {served.layer}, {chosen}"
    )
    print_result({"stream": stream, **view}, [line], output)


def print_held(stream: str, held: Held, output: str) -> None:
    lines = span_words(held.holds) or ["no hours are kept beyond their time"]
    lines += [
        f"erasure {id} was requested before and is not done: these hours lose its records"
        for id in held.erasures
    ]
    view = {
        "stream": stream,
        "changed": held.changed,
        "holds": held.holds,
        "erasures": held.erasures,
    }
    print_result(view, [f"{stream}: {line}" for line in lines], output)


def print_adopted(stream: str, topic: str, adopted: Adopted | None, output: str) -> None:
    if output == "json":
        print_json(_adopted_view(stream, adopted))
        return
    if adopted is None:
        print(f"{stream}: nothing to adopt: the position belongs to topic {topic}")
        return
    position = ", ".join(f"{p}: {o}" for p, o in to_keys(adopted.position.offsets).items())
    again = (
        "the same topic"
        if adopted.former_id == adopted.position.topic_id
        else f"in place of {adopted.former_id}"
    )
    print(f"{stream}: adopted topic id {adopted.position.topic_id} ({again})")
    print(
        f"{stream}: sealed {', '.join(adopted.sealed)} at the published position; all rows stay "
        "served"
    )
    for hour, part in adopted.lost.items():
        print(f"{stream}: hour {hour}: {size(part)} offsets were never read")
    if again == "the same topic":
        print(f"{stream}: records after the end of its log are lost")
    else:
        print(
            f"{stream}: records of {adopted.former_id} after its position are not read; "
            "`anabranch adopt` continues there when the configuration names that topic again"
        )
    print(f"{stream}: continues with hour {adopted.timeline.open} from position {position}")


def _adopted_view(stream: str, adopted: Adopted | None) -> dict[str, Any]:
    if adopted is None:
        return {"stream": stream, "adopted": False}
    return {
        "stream": stream,
        "adopted": True,
        "former_topic_id": adopted.former_id,
        "topic_id": adopted.position.topic_id,
        "sealed": list(adopted.sealed),
        "open_hour": adopted.timeline.open,
        "position": to_keys(adopted.position.offsets),
        "lost": {hour: ranges_to_keys(part) for hour, part in adopted.lost.items()},
    }


def print_merged(stream: str, merged: Merged, dry_run: bool, output: str) -> None:
    overrides = merged.state.overrides
    rows = [
        {
            "hour": s.hour,
            "served": s.layer,
            "added": len(s.add),
            "removed": len(s.remove),
            "reason": s.refused,
        }
        for s in merged.swaps
    ]
    lines = []
    for row in rows:
        outcome = (
            row["reason"]
            or f"served by {row['served']}: {row['added']} files in, {row['removed']} out"
        )
        lines.append(f"{row['hour']} {outcome}")
    lines = lines or ["nothing to merge"]
    for hour, layer in sorted(overrides.items()):
        lines.append(f"{hour} is served by {layer} by choice (`anabranch override`)")
    view = {"stream": stream, "dry_run": dry_run, "swaps": rows, "overrides": overrides}
    print_result(view, [f"{stream}: {line}" for line in lines], output)


def print_written(folder: str, written: Sequence[Path], output: str) -> None:
    """Print the files of a starter folder, and the next steps."""
    there = "" if Path(folder).resolve() == Path.cwd() else f"cd {shlex.quote(folder)}, "
    stream, environment = (
        Path(folder) / "conf" / name for name in ("streams/game_events.yaml", "anabranch.yaml")
    )
    lines = [
        *(f"wrote {file}" for file in written),
        f"edit: {stream} is one topic, its table and schema: copy it for a topic of your own",
        f"edit: {environment} has the addresses of Kafka, S3 and the catalog",
        f"next: {there}anabranch dev up, anabranch apply (README.md has every step)",
    ]
    print_result({"folder": folder, "files": [str(file) for file in written]}, lines, output)
