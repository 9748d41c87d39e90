"""Recording the owner of a table, the stream that writes it, if the table has none or if the stream
was renamed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from anabranch.config import Stream
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import OWNER, AnotherStreamsTable, Owner, read_owner
from anabranch.kafka.client import KafkaAdapter

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

    from anabranch.offsets.position import Position

LOG = logging.getLogger(__name__)


def take_over(lake: Lake, stream: Stream, kafka: KafkaAdapter, position: Position) -> bool:
    """Write the stream into its table if the table names no stream or another name; return whether
    it was written.

    `position` is the table's. Only a stream that reads the position's topic may take a table over:
    raises AnotherStreamsTable for another topic id, since the owner is then unknown.
    """
    owner = read_owner(lake.load(stream.table))
    if owner is not None and owner.stream == stream.name:
        return False
    if position.topic_id:
        topic = kafka.describe(stream.topic)
        if topic is None:
            return False
        if topic.id != position.topic_id:
            raise AnotherStreamsTable(
                f"streams/{stream.name}.yaml: table {stream.table}: expected a table that was "
                f"read from topic {stream.topic} (id {topic.id}), found a position of topic id "
                f"{position.topic_id}; nothing was changed. If the table is another stream's: "
                "give `table:` another name. If the topic was deleted and made again, or moved to "
                f"another cluster: run `anabranch adopt {stream.name}`"
            )
    wanted = Owner(stream.name, stream.topic, kafka.cluster_id()).to_json()

    def write(table: Table, tx: Transaction) -> None:
        if table.properties.get(OWNER) in (None, owner.to_json() if owner is not None else None):
            tx.set_properties({OWNER: wanted})

    admin.change_table(lake, stream.table, "owner", write)
    LOG.info("stream %s: table %s belongs to it from now on", stream.name, stream.table)
    return True
