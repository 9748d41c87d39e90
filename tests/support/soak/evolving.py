"""Random changes of a stream's file that Anabranch accepts. Pure except for the dice."""

import random
from dataclasses import dataclass, field

_WIDER = {"INT": "BIGINT", "FLOAT": "DOUBLE", "DECIMAL(6, 2)": "DECIMAL(9, 2)"}
_NEW = (
    *_WIDER, "STRING", "TIMESTAMP", "ARRAY<INT>", "MAP<STRING, INT>",
    "STRUCT<x: INT, name: STRING>",
)  # fmt: skip

Columns = tuple[tuple[str, str], ...]


@dataclass
class Evolving:
    """All versions of a table's columns, oldest first, and the index of that in its file."""

    versions: list[Columns]
    dice: random.Random
    at: int = field(default=0)

    @property
    def schema(self) -> str:
        """The columns of the file, in the form of its key `schema`."""
        return ", ".join(f"{name} {kind}" for name, kind in self.versions[self.at])

    @property
    def is_behind(self) -> bool:
        """Whether the file has an older version than the table."""
        return self.at < len(self.versions) - 1

    def step(self) -> str:
        """Change the file to the table's version, an older or a new one; describe the change."""
        if self.is_behind:
            self.at = len(self.versions) - 1
            return "the newest file put in its place again"
        if self.at > 0 and self.dice.random() < 0.4:
            self.at = self.dice.randrange(self.at)
            return f"the file rolled back to its version {self.at + 1} of {len(self.versions)}"
        columns, words = next_columns(self.versions[-1], self.dice)
        self.versions.append(columns)
        self.at = len(self.versions) - 1
        return words


def next_columns(columns: Columns, dice: random.Random) -> tuple[Columns, str]:
    """Add a column at a random place, or widen one. Return the columns, and a description."""
    wide = [i for i, (_, kind) in enumerate(columns) if kind in _WIDER]
    if wide and dice.random() < 0.5:
        place = dice.choice(wide)
        name, kind = columns[place]
        wider = (*columns[:place], (name, _WIDER[kind]), *columns[place + 1 :])
        return wider, f"{name} widened to {_WIDER[kind]}"
    name, kind = f"added_{len(columns)}", dice.choice(_NEW)
    place = dice.randint(0, len(columns))
    return (*columns[:place], (name, kind), *columns[place:]), f"column {name} {kind} added"


def columns_of(schema: str) -> Columns:
    """Parse the first version of a stream's columns, whose types have no commas."""
    pairs = (column.strip().split(" ", 1) for column in schema.split(","))
    return tuple((name, kind) for name, kind in pairs)
