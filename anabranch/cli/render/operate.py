"""Print what commands that change something have done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.cli.render import print_result
from anabranch.common.output import print_json
from anabranch.protocol.holds import span_words

if TYPE_CHECKING:
    from anabranch.common.errors import AnabranchError
    from anabranch.config import Members, Stream
    from anabranch.protocol.holding import Held
    from anabranch.protocol.override import Served


def print_new_streams(new: Sequence[Stream], members: Members, count: int) -> None:
    """Print the streams of families that have no table yet, of `count`."""
    if new:
        print(f"families: {len(new)} new of {count} streams")
    for stream in new:
        family = members[stream.name].family
        print(f"family {family}: topic {stream.topic}: stream {stream.name}, table {stream.table}")


def print_changes(stream: str, changes: Iterable[str]) -> None:
    for change in changes:
        print(f"{stream}: {change}", flush=True)


def print_applied(streams: Iterable[str], done: Mapping[str, list[str]], errors: Mapping[str, AnabranchError]) -> None:
    """Print the changes and the error of each stream as JSON."""
    found = {name: str(error) for name, error in errors.items()}
    print_json([{"stream": n, "changes": done.get(n, []), "error": found.get(n)} for n in streams])


def print_served(stream: str, hour: str, served: Served, output: str) -> None:
    view = {"hour": hour, "served": served.layer, "override": served.override, "changed": served.changed}
    chosen = "by choice" if served.override else "by the rule"
    line = f"{stream}: {hour} is {'now ' if served.changed else ''}served by {served.layer}, {chosen}"
    print_result({"stream": stream, **view}, [line], output)


def print_held(stream: str, held: Held, output: str) -> None:
    lines = span_words(held.holds) or ["no hours are kept beyond their time"]
    lines += [
        f"erasure {id} was requested before and is not done: these hours lose its records" for id in held.erasures
    ]
    view = {"stream": stream, "changed": held.changed, "holds": held.holds, "erasures": held.erasures}
    print_result(view, [f"{stream}: {line}" for line in lines], output)
