"""The parts of a draft, and its text as a stream's file."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from anabranch.common.output import text as one_line
from anabranch.config import TAKEN_COLUMNS
from anabranch.config.columns import RESCUED, Column
from anabranch.config.plain import NAME, REFERENCE
from anabranch.config.schema import columns_mapping
from anabranch.decode.guessed import Guess, guess

MOST_COLUMNS = 300
_NO_NAME = re.compile(r'["\\\x00-\x1f]')
_NO_VALUE = Guess("string", note="null in each record")


@dataclass
class Sketch:
    """A stream without name, topic and table. `schema`: in place of `columns`, that of a subject.
    `implied`: the path before a column's own name that needs no `from`. `notes`: what a person must
    decide, by column; `key_note` and `time_note`: of the key and the event time; `comments`: of the
    whole. `keys`: what the format or envelope says of an event's identity, in order; `time`: of its
    time."""

    format: object = "json"
    columns: list[Column] = field(default_factory=list)
    schema: object = None
    implied: tuple[str, ...] = ()
    select: list[object] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)
    time: str = ""
    key_note: str = ""
    time_note: str = ""
    rescues: bool = False

    def add(self, of: Guess, wanted: str, path: tuple[str, ...] = ()) -> str:
        """Add a column, and return its name: `wanted`, if none has it. `path`: its field."""
        taken = {RESCUED.name, *TAKEN_COLUMNS, *(c.name.lower() for c in self.columns)}
        name = wanted
        if not NAME.fullmatch(name) or name.lower() in taken:
            plain = unicodedata.normalize("NFKD", wanted.replace("ß", "ss"))
            plain = "".join(c for c in plain if not unicodedata.combining(c))
            name = re.sub(r"[^A-Za-z0-9_]+", "_", plain).strip("_") or "field"
            name = f"_{name}" if name[0].isdigit() else name
            base, number = name, 2
            while name.lower() in taken:
                name, number = f"{base}_{number}", number + 1
        path = () if path == (*self.implied, name) else path
        self.columns.append(Column(name, of.type, True, False, path, of.notation))
        if of.note:
            self.notes[name] = of.note
        return name

    def add_fields(
        self,
        objects: Sequence[Mapping[str, Any]],
        stamps: Sequence[int],
        path: tuple[str, ...] = (),
    ) -> None:
        """Add a column for each field of objects; fields that cannot be columns are rescued."""
        counts: dict[str, int] = {}
        for one in objects:
            for name in one:
                counts[name] = counts.get(name, 0) + 1
        usable = [name for name in counts if is_usable(name)]
        # The stable sort keeps the fields' order among those of equal frequency.
        chosen = set(sorted(usable, key=lambda name: -counts[name])[:MOST_COLUMNS])
        if len(chosen) < len(counts):
            self.rescues = True
        # Names that need no other come first, so that each keeps its own.
        for name in sorted((n for n in counts if n in chosen), key=lambda n: not NAME.fullmatch(n)):
            found = [one.get(name) for one in objects]
            inner = _wrapper(found)
            found = [one and one[inner] for one in found] if inner else found
            of = guess(found, name, stamps) or _NO_VALUE
            self.add(of, name, (*path, name, *([inner] if inner else ())))

    def replace(self, column: Column, note: str) -> None:
        self.columns[[c.name for c in self.columns].index(column.name)] = column
        self.notes[column.name] = note


def _wrapper(values: Sequence[Any]) -> str:
    """Return the one name in all objects that MongoDB writes for a value: `{"$oid": "5f"}`."""
    given = [value for value in values if value is not None]
    names = {tuple(value) if isinstance(value, Mapping) else () for value in given}
    only = names.pop() if len(names) == 1 else ()
    return only[0] if len(only) == 1 and only[0].startswith("$") and is_usable(only[0]) else ""


def is_usable(name: str) -> bool:
    """Return whether a file can name a field: no text of a file contains `${NAME}`."""
    return bool(name) and not _NO_NAME.search(name) and not REFERENCE.search(name)


def text_of(
    sketch: Sketch, name: str, topic: str, table: str, key: Sequence[str], time: str = ""
) -> str:
    """Return the sketch as the file of stream `name`. Pure."""
    lines = [
        f"# conf/streams/{name}.yaml",
        *(f"# {one_line(comment)}" for comment in sketch.comments),
    ]
    lines += _entries({"topic": topic, "table": table, "format": sketch.format})
    if sketch.schema is not None:
        lines += _entries({"schema": sketch.schema})
    else:
        lines.append("schema:")
        for column in sketch.columns:
            note = sketch.notes.get(column.name, "")
            [line] = _entries(columns_mapping([column]))
            lines.append(f"  {line}{_comment(note)}")
    if sketch.select:
        lines.append("select:")
        lines += [f"  - {line}" for one in sketch.select for line in [_flow(one)]]
    keys = "none" if not key else key[0] if len(key) == 1 else list(key)
    [line] = _entries({"key": keys})
    lines.append(f"{line}{_comment(sketch.key_note)}")
    if time:
        [line] = _entries({"event_time": {"column": time}})
        lines.append(f"{line}{_comment(sketch.time_note)}")
    if sketch.rescues:
        lines.append("unknown: rescue # fields without a column, in the column rescued")
    return "\n".join(lines) + "\n"


def _comment(note: str) -> str:
    return f" # {one_line(note)}" if note else ""


def _entries(values: Mapping[str, object]) -> Iterable[str]:
    return [f"{_flow(key)}: {_flow(value)}" for key, value in values.items()]


def _flow(value: object) -> str:
    """Return a value in YAML's flow style, on one line."""
    dumped = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31
    )
    return dumped.removesuffix("...\n").strip("\n")
