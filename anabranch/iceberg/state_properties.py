"""The state in a branch's snapshot, with its long part stored in table properties. Each publish
writes a metadata file, and each metadata file contains every snapshot. So a snapshot contains only
the properties that change with every publish. The others are one text, stored once in table
properties named by the hashes of their contents (`anabranch.state.<hash>`). The snapshot refers to
the text by its hash. The commit of a publish sets the properties that its snapshots need, and
removes those that no snapshot needs any more: decision 35.
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

if TYPE_CHECKING:
    from pyiceberg.table import Table

STATE = "anabranch.state."
# A snapshot's property with the hash of its text.
_ROOT = "anabranch.state"
_PACKED = "zlib:"

# Properties that change with every publish, and the maximum characters of each in a snapshot.
_SUMMARY_LIMITS = {
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
# In the snapshot only when new: the batch layer's dead letters wait for an hour, and each publish
# of the speed layer repeats them.
_SUMMARY_WHILE_NEW = "anabranch.dead-letters"
# Other properties stay in the snapshot if all of them together have at most these characters.
_WORTH_A_PROPERTY = 400
_WORTH_PACKING = 160
# Properties with this value are omitted: an absent list is empty.
_EMPTY_LIST = "[]"

# Some catalogs copy table properties to a database whose columns have 4,000 characters.
LONGEST = 3_500
# A link to another part. JSON text has a tab only as an escape.
_LINK = re.compile(r"\t([0-9a-f]{16})\t")
# An hour's entry in a JSON object by hours. It stays the same while other hours change.
_HOUR = re.compile(r'"\d{4}-\d\d-\d\dT\d\d": ?\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}')
_WORTH_A_PART = 100
_PIECE = re.compile(r"\t[0-9a-f]{16}\t[^\t]?|[^\t]{1,1000}")
_SHORTEST_CHUNK = 80
# A text with more links is split, so that a new or removed hour changes few parts.
_LINKS = 16


class StateGone(Terminal):
    """A snapshot refers to table properties that are missing or changed."""

    remedy = "set the property again to its value in an earlier metadata file of the table"


def pack(text: str) -> str:
    """Return a value as stored in a snapshot or property: compressed if that is shorter. Pure."""
    if len(text) < _WORTH_PACKING:
        return text
    packed = _PACKED + base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return min(text, packed, key=len)


def unpack(value: str) -> str:
    if not value.startswith(_PACKED):
        return value
    return zlib.decompress(base64.b85decode(value.removeprefix(_PACKED))).decode()


def plan_split(
    properties: Mapping[str, str], before: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the packed properties for a snapshot, and the unpacked ones for table properties.
    `before`: all previous properties of the branch. Pure."""
    properties = {k: v for k, v in properties.items() if v != _EMPTY_LIST}
    unchanged = (
        {_SUMMARY_WHILE_NEW}
        if properties.get(_SUMMARY_WHILE_NEW) == before.get(_SUMMARY_WHILE_NEW)
        else set[str]()
    )
    own = [k for k in _SUMMARY_LIMITS if k in properties and k not in unchanged]
    in_summary = {
        k: packed for k in own if len(packed := pack(properties[k])) <= _SUMMARY_LIMITS[k]
    }
    in_properties = {k: v for k, v in properties.items() if k not in in_summary}
    # Very long values are not packed just to measure them.
    if sum(len(v) for v in in_properties.values()) <= 100 * _WORTH_A_PROPERTY:
        packed_rest = {k: pack(v) for k, v in in_properties.items()}
        if sum(len(k) + len(v) for k, v in packed_rest.items()) <= _WORTH_A_PROPERTY:
            return in_summary | packed_rest, {}
    return in_summary, in_properties


def plan_summary(
    properties: Mapping[str, str], before: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return a new snapshot's summary properties, and the table properties that it needs.
    `properties`: all properties of its branch; `before`: all previous ones. Pure."""
    in_summary, in_properties = plan_split(properties, before)
    if not in_properties:
        return in_summary, {}
    parts: dict[str, str] = {}
    root = _store(
        "\n".join(f"{key} {_by_hours(in_properties[key], parts)}" for key in sorted(in_properties)),
        parts,
    )
    return {**in_summary, _ROOT: root}, parts


def _by_hours(text: str, parts: dict[str, str]) -> str:
    """Replace each hour's entry by a link to a part, so that the snapshots of a week share it."""
    return _HOUR.sub(
        lambda m: _link(_store(m[0], parts)) if len(m[0]) >= _WORTH_A_PART else m[0], text
    )


def _store(text: str, parts: dict[str, str]) -> str:
    """Add a text to the parts, split if long; return its root part's hash."""
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
    """Yield the text in chunks of at most LONGEST characters, with content-defined boundaries: a
    change in one place leaves most other chunks unchanged."""
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
    """Return all properties of a snapshot: own and referred to. Raises StateGone."""
    root = properties.get(_ROOT)
    in_properties = _read(table, root) if root is not None else {}
    return {**in_properties, **{k: unpack(v) for k, v in properties.items() if k != _ROOT}}


def look_up(table: Table, properties: Mapping[str, str], key: str) -> str | None:
    """Return one property of a snapshot, wherever it is stored, or None. Raises StateGone."""
    if (value := properties.get(key)) is not None:
        return unpack(value)
    return load_all(table, properties).get(key)


def plan_unused(
    held: Mapping[str, str], needed: Mapping[str, str], summaries: Iterable[Mapping[str, str]]
) -> tuple[str, ...]:
    """Return the state properties of `held` that no summary refers to. `summaries`: all that the
    table will have; `needed`: this commit's state properties. Pure."""
    used, to_read = set[str](), [STATE + s[_ROOT] for s in summaries if _ROOT in s]
    while to_read:
        key = to_read.pop()
        if key not in used and (value := needed.get(key, held.get(key))) is not None:
            to_read += (STATE + digest for digest in _links(value))
        used.add(key)
    return tuple(sorted(k for k in held if k.startswith(STATE) and k not in used))


@lru_cache(maxsize=1 << 12)
def _links(value: str) -> tuple[str, ...]:
    return tuple(_LINK.findall(unpack(value)))


# Cached, since every micro-batch loads a state. The text of a hash is the same in every table. All
# threads of a process use the cache, with the three branches of each stream. Each access is atomic.
_READ: dict[str, Mapping[str, str]] = {}
_REMEMBERED = 1 << 10


def _read(table: Table, root: str) -> Mapping[str, str]:
    if (known := _READ.get(root)) is not None:
        return known
    lines = (line.partition(" ") for line in _text_of(table, root).split("\n"))
    if len(_READ) >= _REMEMBERED:
        _READ.clear()
    in_properties = _READ[root] = {key: value for key, _, value in lines}
    return in_properties


def _text_of(table: Table, digest: str) -> str:
    """Return the text of a hash. Raises StateGone if a part of it is missing or changed."""
    value = table.metadata.properties.get(STATE + digest)
    text = _unpacked(value) if value is not None else None
    # A text that another program changed would be used as position or accepted hours; rows would be
    # read twice or skipped.
    if text is None or _digest(text) != digest:
        found = "none" if value is None else f"{len(value)} other characters"
        name = ".".join(table.name())
        raise StateGone(
            f"read the state of the branches of {name}: expected its property {STATE}{digest}, "
            f"found {found}"
        )
    return _LINK.sub(lambda m: _text_of(table, m[1]), text)


def _unpacked(value: str) -> str | None:
    try:
        return unpack(value)
    except (ValueError, zlib.error):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
