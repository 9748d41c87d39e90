"""What a branch's snapshot says in our words, and where the long part of it is kept: in the table's properties.

Every snapshot that the table remembers is in each metadata file, and each publish writes one. So a snapshot
contains only what changes with every publish. The rest is one text, stored once in table properties whose names are
hashes of their contents (`anabranch.state.<hash>`); the snapshot refers to it by its hash. A publish sets the
properties that its snapshots need and removes those that no remembered snapshot needs any more, in its own commit:
docs/decisions/0035.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from anabranch.common.errors import Terminal
from anabranch.iceberg import side_files
from anabranch.iceberg.side_files import REFERENCE, TIMELINE, reference

if TYPE_CHECKING:
    from pyiceberg.table import Table

STATE = "anabranch.state."
# A program that knows side files and not these properties looks for a file of this name, and stops with it.
_IN_PROPERTIES = "state-in-table-properties-needs-a-newer-anabranch/"
_PACKED = "zlib:"

# What changes with every publish, and up to how many characters of it a snapshot contains.
_ITSELF = {
    "anabranch.publish": 1_000,
    "anabranch.position": 8_000,
    "anabranch.content": 1_000,
    "anabranch.merged": 1_000,
    "anabranch.dead-letters": 1_000,
    "anabranch.dead-letters-done": 8_000,
    "anabranch.measured": 4_000,
    # For readers of any engine.
    "anabranch.complete-through": 100,
    "anabranch.fresh-through": 100,
}
# Those of the batch layer wait for an hour, in which the speed layer's publishes carry them on.
_ITSELF_WHILE_NEW = "anabranch.dead-letters"
# What changes seldom stays in the snapshot when all of it is as short as this.
_WORTH_A_PROPERTY = 400
_WORTH_PACKING = 160
# Of an absent list nothing waits either.
_NOTHING = "[]"

# Some catalogs copy table properties to a database whose columns take 4,000 characters.
LONGEST = 3_500
# A part that another part refers to; neither character is in JSON text outside an escape.
_LINK = re.compile(r"\t([0-9a-f]{16})\t")
# What one hour has in a JSON object by hours. It stays the same while hours come and go around it.
_HOUR = re.compile(r'"\d{4}-\d\d-\d\dT\d\d": ?\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}')
_WORTH_A_PART = 100
_PIECE = re.compile(r"\t[0-9a-f]{16}\t[^\t]?|[^\t]{1,1000}")
_SHORTEST_CHUNK = 80
# A text with more links is divided, so that an hour that comes or goes changes few of them.
_LINKS = 16


class StateGone(Terminal):
    """A snapshot refers to table properties that the table does not have as they were set."""

    remedy = "set the property again as an earlier metadata file of the table has it"


def pack(text: str) -> str:
    """A value as a snapshot or a property has it: compressed where that is shorter."""
    if len(text) < _WORTH_PACKING:
        return text
    packed = _PACKED + base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return min(text, packed, key=len)


def unpack(value: str) -> str:
    if not value.startswith(_PACKED):
        return value
    return zlib.decompress(base64.b85decode(value.removeprefix(_PACKED))).decode()


def plan_split(properties: Mapping[str, str], before: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What a snapshot contains, packed, and what table properties have for it; `before` is all that the branch said
    until now. Pure."""
    properties = {k: v for k, v in properties.items() if v != _NOTHING}
    carried_on = (
        {_ITSELF_WHILE_NEW} if properties.get(_ITSELF_WHILE_NEW) == before.get(_ITSELF_WHILE_NEW) else set[str]()
    )
    own = [k for k in _ITSELF if k in properties and k not in carried_on]
    itself = {k: packed for k in own if len(packed := pack(properties[k])) <= _ITSELF[k]}
    aside = {k: v for k, v in properties.items() if k not in itself}
    # Nothing that is long is packed just to see how long it is.
    if sum(len(v) for v in aside.values()) <= 100 * _WORTH_A_PROPERTY:
        packed_aside = {k: pack(v) for k, v in aside.items()}
        if sum(len(k) + len(v) for k, v in packed_aside.items()) <= _WORTH_A_PROPERTY:
            return itself | packed_aside, {}
    return itself, aside


def plan_summary(properties: Mapping[str, str], before: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """A new snapshot's properties, and the table properties that it needs, for all that its branch says; `before` is
    all that the branch said until now. Pure."""
    itself, aside = plan_split(properties, before)
    if not aside:
        return itself, {}
    parts: dict[str, str] = {}
    root = _store("\n".join(f"{key} {_by_hours(aside[key], parts)}" for key in sorted(aside)), parts)
    return itself | reference(_IN_PROPERTIES + root, TIMELINE in aside), parts


def _by_hours(text: str, parts: dict[str, str]) -> str:
    """The text with a link in the place of each hour's entry: of what a week's snapshots say, each hour is there
    once."""
    return _HOUR.sub(lambda m: _link(_store(m[0], parts)) if len(m[0]) >= _WORTH_A_PART else m[0], text)


def _store(text: str, parts: dict[str, str]) -> str:
    """Add the text to the parts, in as many as it takes; returns the hash of the first, which leads to the others."""
    while text.count("\t") > 2 * _LINKS or len(text) > 4 * LONGEST or len(_part(text)[1]) > LONGEST:
        text = "".join(_link(_add(chunk, parts)) for chunk in _chunks(text))
    return _add(text, parts)


def _add(text: str, parts: dict[str, str]) -> str:
    digest, value = _part(text)
    parts[STATE + digest] = value
    return digest


@lru_cache(maxsize=1 << 12)
def _part(text: str) -> tuple[str, str]:
    return _digest(text), pack(text)


def _link(digest: str) -> str:
    return f"\t{digest}\t"


def _chunks(text: str) -> Iterable[str]:
    """The text in chunks of at most LONGEST characters, which end where their own content says: what comes or goes in
    one place leaves most of the others as they were."""
    chunk = ""
    for piece in _PIECE.findall(text):
        chunk += piece
        ends = len(chunk) >= _SHORTEST_CHUNK and zlib.crc32(piece.encode()) % 4 == 0
        if ends or len(chunk) > LONGEST - 1_000:
            yield chunk
            chunk = ""
    if chunk:
        yield chunk


def load_all(table: Table, properties: Mapping[str, str]) -> dict[str, str]:
    """All properties of a snapshot: its own, and those that it refers to in table properties or, in snapshots of
    earlier versions, in a side file. Raises Terminal, Transient."""
    name = side_files.named(properties)
    aside: Mapping[str, str] = {}
    if name is not None and name.startswith(_IN_PROPERTIES):
        aside = _read(table, name.removeprefix(_IN_PROPERTIES))
    elif name is not None:
        aside = side_files.read(table, name)
    return {**aside, **{k: unpack(v) for k, v in properties.items() if not v.startswith(REFERENCE)}}


def look_up(table: Table, properties: Mapping[str, str], key: str) -> str | None:
    """One value of all that a snapshot says. Raises Terminal, Transient."""
    value = properties.get(key)
    if value is not None and not value.startswith(REFERENCE):
        return unpack(value)
    return load_all(table, properties).get(key)


def side_file_of(properties: Mapping[str, str]) -> str | None:
    """The side file that a snapshot's properties name; None of one whose state is in table properties. Pure."""
    name = side_files.named(properties)
    return None if name is None or name.startswith(_IN_PROPERTIES) else name


def plan_unused(
    held: Mapping[str, str], needed: Mapping[str, str], summaries: Iterable[Mapping[str, str]]
) -> tuple[str, ...]:
    """Of the table properties `held` those of the state that none of the summaries, which are all that the table will
    remember, leads to. `needed` are those that come with the commit. Pure."""
    names = [side_files.named(s) for s in summaries]
    roots = {STATE + n.removeprefix(_IN_PROPERTIES) for n in names if n is not None and n.startswith(_IN_PROPERTIES)}
    used, to_read = set[str](), list(roots)
    while to_read:
        key = to_read.pop()
        if key not in used and (value := needed.get(key, held.get(key))) is not None:
            to_read += (STATE + digest for digest in _links(value))
        used.add(key)
    return tuple(sorted(k for k in held if k.startswith(STATE) and k not in used))


@lru_cache(maxsize=1 << 12)
def _links(value: str) -> tuple[str, ...]:
    return tuple(_LINK.findall(unpack(value)))


# A state is loaded with every micro-batch. The text of a hash is the same in every table.
_READ: dict[str, Mapping[str, str]] = {}
_REMEMBERED = 12


def _read(table: Table, root: str) -> Mapping[str, str]:
    if (known := _READ.get(root)) is not None:
        return known
    lines = (line.partition(" ") for line in _text_of(table, root).split("\n"))
    aside = _READ[root] = {key: value for key, _, value in lines}
    while len(_READ) > _REMEMBERED:
        _READ.pop(next(iter(_READ)))
    return aside


def _text_of(table: Table, digest: str) -> str:
    """The text of a hash. Raises Terminal when the table lacks a part of it, or has another's."""
    value = table.metadata.properties.get(STATE + digest)
    text = _unpacked(value) if value is not None else None
    if text is None or _digest(text) != digest:
        found = "none" if value is None else f"{len(value)} characters of others"
        name = ".".join(table.name())
        raise StateGone(f"read what the branches of {name} say: expected its property {STATE}{digest}, found {found}")
    return _LINK.sub(lambda m: _text_of(table, m[1]), text)


def _unpacked(value: str) -> str | None:
    try:
        return unpack(value)
    except (ValueError, zlib.error):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
