"""Tags for snapshots that a long read needs. Each publish expires all but the newest hundred
snapshots, even while another process reads them. Spark reloads a snapshot whenever it plans a
query, so the head that a rebuild started from must stay until the rebuild ends. A tag keeps it. The
tag has a maximum age, so tags of killed processes expire.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anabranch.common.errors import AnabranchError, JvmGone, Transient
from anabranch.iceberg.commits import Commit, Tag
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import READING
from anabranch.iceberg.staging import WITHIN

if TYPE_CHECKING:
    from pyiceberg.table import Table

LOG = logging.getLogger(__name__)


@contextmanager
def held_snapshots(
    lake: Lake, table_name: str, snapshots: Iterable[int], what: str = ""
) -> Iterator[None]:
    """Keep commits from expiring these snapshots inside the context, for at most half a day. Moves
    no head, so it causes no publish to be refused. Raises Transient if a snapshot is already
    expired, or if other commits come first for a quarter of a minute.

    If the process or its JVM dies meanwhile, the tags stay, and `count_deaths` finds them by
    `what`.
    """
    name = f"{READING}{what}-{uuid.uuid4().hex}" if what else f"{READING}{uuid.uuid4().hex}"
    tags = {f"{name}-{i}": snapshot for i, snapshot in enumerate(dict.fromkeys(snapshots))}
    # Decision 39: the speed layer expires all but the newest hundred snapshots, 100 s with a
    # trigger of 2 s; a rebuild reads for longer.
    _hold(lake, table_name, tags)
    try:
        yield
    except JvmGone:
        raise
    except BaseException:
        _release(lake, table_name, tags)
        raise
    _release(lake, table_name, tags)


def count_deaths(table: Table, what: str) -> int:
    """Return how many reads of `what` have not ended: their processes died, or are still reading.
    Pure."""
    begin = f"{READING}{what}-"
    tags = [name for name in table.metadata.refs if name.startswith(begin)]
    return len({name.rpartition("-")[0] for name in tags})


def _hold(lake: Lake, table_name: str, tags: dict[str, int]) -> None:
    age = int(WITHIN.total_seconds() * 1000)
    made = tuple(Tag(name, snapshot, age) for name, snapshot in tags.items())

    def plan(table: Table) -> Commit | None:
        if gone := [s for s in tags.values() if table.metadata.snapshot_by_id(s) is None]:
            raise Transient(
                f"read {table_name}: expected snapshot {gone[0]}, found it expired meanwhile; try "
                "again"
            )
        # The answer of the previous attempt may have been lost.
        if tags.keys() <= table.metadata.refs.keys():
            return None
        return Commit(uuid.uuid4().hex, {}, (), tags=made)

    lake.commit_until_landed(table_name, "keep snapshots for a read", plan)


def _release(lake: Lake, table_name: str, tags: dict[str, int]) -> None:
    def plan(table: Table) -> Commit | None:
        left = tuple(name for name in tags if name in table.metadata.refs)
        return Commit(uuid.uuid4().hex, {}, (), drop_tags=left) if left else None

    try:
        lake.commit_until_landed(table_name, "remove the tags of a read", plan)
    except AnabranchError as error:
        LOG.debug("tags of %s stay until their age ends: %s", table_name, error)
