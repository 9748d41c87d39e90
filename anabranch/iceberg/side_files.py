"""Side files, in which earlier versions stored the state of branches. They are read, never written.

The next publish of a branch moves its state to table properties
(`anabranch.iceberg.state_properties`). Side files are needed until no snapshot refers to one.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import explain

if TYPE_CHECKING:
    from pyiceberg.table import Table

SUFFIX = ".anabranch"
_SIDE_FILE = "anabranch.side-file"
# If the state has a timeline, this property has the reference instead, so that a version without
# side files stops instead of using another branch's timeline as the newest.
TIMELINE = "anabranch.timeline"
REFERENCE = "side-file:"


class SideFileGone(Terminal):
    """A snapshot refers to a side file that is missing from storage or changed."""

    remedy = "restore the file from a version or a copy of the bucket"


def reference(name: str, has_timeline: bool) -> dict[str, str]:
    """Return the property by which a snapshot refers to its side file. Pure."""
    return {TIMELINE if has_timeline else _SIDE_FILE: REFERENCE + name}


def named(properties: Mapping[str, str]) -> str | None:
    """Return the side file that a snapshot's properties refer to; None if there is none. Pure."""
    for key in (TIMELINE, _SIDE_FILE):
        if (value := properties.get(key, "")).startswith(REFERENCE):
            return value.removeprefix(REFERENCE)
    return None


def path_of(table: Table, name: str) -> str:
    """Return the path of a side file. It is relative to the table's location, so the file is found
    wherever the table is registered. Pure."""
    return f"{table.location().rstrip('/')}/metadata/{name}"


def read(table: Table, name: str) -> Mapping[str, str]:
    """Return the contents of a side file. Raises SideFileGone, Terminal, Transient."""
    path = path_of(table, name)
    doing = f"read the state of the branches of {'.'.join(table.name())}"
    try:
        with table.io.new_input(path).open() as stream:
            content = stream.read()
    except FileNotFoundError as error:
        raise SideFileGone(f"{doing}: expected {path}, found none") from error
    except OSError as error:
        raise explain(doing, error) from error
    if not name.endswith(f"-{hashlib.sha256(content).hexdigest()[:16]}{SUFFIX}"):
        raise SideFileGone(
            f"{doing}: expected {path} as it was written, found {len(content)} other bytes"
        )
    aside: dict[str, str] = json.loads(zlib.decompress(content))
    return aside
