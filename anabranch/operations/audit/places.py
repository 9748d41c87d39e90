"""The places in Kafka of the rows of a table that another program writes, on disk beyond a fixed
amount of memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from anabranch.common.progress import Progress
from anabranch.iceberg.other_tables import OtherTable
from anabranch.offsets.position import Offsets, Ranges
from serving_layer.query.datasets import connected
from serving_layer.query.place_columns import PlaceColumns, locate

if TYPE_CHECKING:
    import duckdb
    from numpy.typing import NDArray

LOG = logging.getLogger(__name__)

_MEMORY = "512MB"
_BATCH_ROWS = 1 << 20


@dataclass(frozen=True)
class TimeCounts:
    """Rows by the hour of their time; `first` has the first offset of each hour by partition. A row
    without a time counts for the hour ''."""

    rows: dict[str, int]
    first: dict[str, Offsets]


class Places:
    """The rows of a table by partition and offset. Opened by `read_places`.

    `unplaced`: rows whose partition or offset is null; `elsewhere`: rows of other topics."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, topic: str) -> None:
        self._connection, self._topic = connection, topic
        self.rows = self.unplaced = self.elsewhere = 0
        self.spans: Ranges = {}
        self.times = TimeCounts(Counter(), {})
        connection.execute("CREATE TABLE places (p INTEGER, o BIGINT)")

    def add(self, batch: pa.RecordBatch, columns: PlaceColumns) -> None:
        self._connection.register("located", locate(pa.table(batch), columns, self._topic))
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE one AS SELECT p, o, own, "
            "coalesce(strftime(time, '%Y-%m-%dT%H'), '') AS hour FROM located"
        )
        self._connection.execute(
            "INSERT INTO places SELECT p, o FROM one WHERE own AND p IS NOT NULL AND o IS NOT NULL"
        )
        self._summarize()

    def _summarize(self) -> None:
        found = self._ask(
            "SELECT p, hour, own, min(o), max(o), count(*), count(o) FROM one GROUP BY ALL"
        )
        for p, hour, own, low, high, rows, placed in found:
            self.rows += rows
            if not own:
                self.elsewhere += rows
                continue
            self.times.rows[hour] += rows
            if p is None or low is None:
                self.unplaced += rows
                continue
            self.unplaced += rows - placed
            start, end = self.spans.get(p, (low, high + 1))
            self.spans[p] = (min(start, low), max(end, high + 1))
            first = self.times.first.setdefault(hour, {})
            first[p] = min(low, first.get(p, low))

    def count(self, partition: int, start: int, end: int) -> NDArray[np.int64]:
        """Return how many rows each offset in `[start, end)` of a partition has."""
        offsets = self._connection.execute(
            "SELECT o FROM places WHERE p = ? AND o >= ? AND o < ?", [partition, start, end]
        ).fetchnumpy()["o"]
        counts: NDArray[np.int64] = np.bincount(offsets - start, minlength=end - start)
        return counts

    def outside(self, ends: Offsets) -> int:
        """Return how many rows have a partition or an offset that the topic's log never had."""
        known = " OR ".join(f"(p = {p} AND o >= 0 AND o < {end})" for p, end in ends.items())
        [(number,)] = self._ask(f"SELECT count(*) FROM places WHERE NOT ({known or 'false'})")
        return int(number)

    def _ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()


@contextmanager
def read_places(table: OtherTable, columns: PlaceColumns, topic: str) -> Iterator[Places]:
    """Read the places of a table's rows. Raises Refused, Transient."""
    # Without such columns the rows are counted by any other one.
    wanted = list(dict.fromkeys(c.reads for c in columns.all)) or table.schema.names[:1]
    with connected(_MEMORY) as connection:
        places = Places(connection, topic)
        with Progress(LOG, f"read {table.what.partition(',')[0]}", "files", len(table.parts)) as at:
            for part in table.parts:
                for batch in part.iter_batches(_BATCH_ROWS, wanted):
                    places.add(batch, columns)
                at.step()
        yield places
