"""Side files: what a branch says, where it is too long to stand in every snapshot.

Every snapshot that the table remembers stands in each metadata file, and each publish writes one. So a snapshot says
itself only what changes with every publish. What changes seldom, or is long, stands in one immutable file below the
table's `metadata/`, which all snapshots that say the same name: docs/decisions/0009.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anabranch.errors import Terminal
from anabranch.remote_errors import explain

if TYPE_CHECKING:
    from pyiceberg.table import Table

SUFFIX = ".anabranch"
_SIDE_FILE = "anabranch.side-file"
# Stands in the place of the timeline too, so that a program that knows no side files stops instead of taking the
# timeline of another branch for the newest.
_TIMELINE = "anabranch.timeline"
_REFERENCE = "side-file:"
_PACKED = "zlib:"

# What changes with every publish, and up to how many characters of it a snapshot says itself.
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
# What changes seldom is not worth a file when all of it is as short as this.
_WORTH_A_FILE = 400
_WORTH_PACKING = 160
# Of an absent list nothing waits either.
_NOTHING = "[]"


class SideFileGone(Terminal):
    """A snapshot names a side file that storage does not have."""


def pack(text: str) -> str:
    """A value as a snapshot says it: compressed where that is shorter."""
    if len(text) < _WORTH_PACKING:
        return text
    packed = _PACKED + base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return min(text, packed, key=len)


def unpack(value: str) -> str:
    if not value.startswith(_PACKED):
        return value
    return zlib.decompress(base64.b85decode(value.removeprefix(_PACKED))).decode()


def plan_split(properties: Mapping[str, str], before: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What a snapshot says itself, packed, and what a side file says for it; `before` is all that the branch said until
    now. Pure."""
    properties = {k: v for k, v in properties.items() if v != _NOTHING}
    carried_on = (
        {_ITSELF_WHILE_NEW} if properties.get(_ITSELF_WHILE_NEW) == before.get(_ITSELF_WHILE_NEW) else set[str]()
    )
    own = [k for k in _ITSELF if k in properties and k not in carried_on]
    itself = {k: packed for k in own if len(packed := pack(properties[k])) <= _ITSELF[k]}
    aside = {k: v for k, v in properties.items() if k not in itself}
    # Nothing that is long is packed just to see how long it is.
    if sum(len(v) for v in aside.values()) <= 100 * _WORTH_A_FILE:
        packed_aside = {k: pack(v) for k, v in aside.items()}
        if sum(len(k) + len(v) for k, v in packed_aside.items()) <= _WORTH_A_FILE:
            return itself | packed_aside, {}
    return itself, aside


def named(properties: Mapping[str, str]) -> str | None:
    """The name of the side file that a snapshot's properties refer to. Pure."""
    for key in (_TIMELINE, _SIDE_FILE):
        if (value := properties.get(key, "")).startswith(_REFERENCE):
            return value.removeprefix(_REFERENCE)
    return None


def path_of(table: Table, name: str) -> str:
    """Where a side file is: relative to the table, so that it is found wherever the table is registered."""
    return f"{table.location().rstrip('/')}/metadata/{name}"


def set_aside(table: Table, properties: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """What a new snapshot says itself of all that its branch says; the rest is written to a side file, or is in the one
    that the branch's head names (`before` are the properties of that snapshot).

    Only that one is used again: the commit requires the head, so that it is referred to until the commit lands. Any
    other might be deleted meanwhile as an orphan. Raises OSError, Terminal, Transient.
    """
    itself, aside = plan_split(properties, whole(table, before))
    if not aside:
        return itself
    name = named(before)
    if name is None or _read(table, name) != aside:
        name = _write(table, aside)
    return itself | {_TIMELINE if _TIMELINE in aside else _SIDE_FILE: _REFERENCE + name}


def whole(table: Table, properties: Mapping[str, str]) -> dict[str, str]:
    """All that a snapshot says, itself and by its side file; also one of before there were side files. Raises Terminal,
    Transient."""
    name = named(properties)
    aside = _read(table, name) if name is not None else {}
    return {**aside, **{k: unpack(v) for k, v in properties.items() if not v.startswith(_REFERENCE)}}


def look_up(table: Table, properties: Mapping[str, str], key: str) -> str | None:
    """One value of all that a snapshot says. Raises Terminal, Transient."""
    value = properties.get(key)
    if value is not None and not value.startswith(_REFERENCE):
        return unpack(value)
    return whole(table, properties).get(key)


# By path; a side file never changes, and a state is loaded with every micro-batch.
_READ: dict[str, Mapping[str, str]] = {}
_REMEMBERED = 12


def _remember(path: str, aside: Mapping[str, str]) -> None:
    _READ.pop(path, None)
    _READ[path] = aside
    while len(_READ) > _REMEMBERED:
        _READ.pop(next(iter(_READ)), None)


def _write(table: Table, aside: Mapping[str, str]) -> str:
    content = zlib.compress(json.dumps(aside, sort_keys=True).encode())
    # The name is never used again, so that an orphan that happens to say the same may be deleted at any time.
    name = f"{uuid.uuid4().hex}-{_digest(content)}{SUFFIX}"
    path = path_of(table, name)
    with table.io.new_output(path).create(overwrite=True) as stream:
        stream.write(content)
    _remember(path, dict(aside))
    return name


def _read(table: Table, name: str) -> Mapping[str, str]:
    path = path_of(table, name)
    if (known := _READ.get(path)) is not None:
        return known
    doing = f"read what the branches of {'.'.join(table.name())} say"
    try:
        with table.io.new_input(path).open() as stream:
            content = stream.read()
    except FileNotFoundError as error:
        raise SideFileGone(f"{doing}: expected {path}, found none; {_REMEDY}") from error
    except OSError as error:
        raise explain(doing, error) from error
    if not name.endswith(f"-{_digest(content)}{SUFFIX}"):
        raise Terminal(f"{doing}: expected {path} as it was written, found {len(content)} bytes of others; {_REMEDY}")
    aside: dict[str, str] = json.loads(zlib.decompress(content))
    _remember(path, aside)
    return aside


_REMEDY = (
    'bring the file back from a version or a copy of the bucket; without one, see docs/operations.md, "A side file is '
    'gone"'
)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
