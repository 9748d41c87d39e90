"""Statements of another program about the records in its table: the offsets of Spark's checkpoint,
and properties of snapshots and commits. The rows' own offsets prove more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyiceberg.table import StaticTable

from anabranch.common.remote_errors import lake_errors
from anabranch.config import Environment
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.files import files_by_name
from anabranch.iceberg.iceberg_source import find_metadata
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.other_tables import location_of

if TYPE_CHECKING:
    from pyiceberg.table import Table

_HUDI = re.compile(r"\.hoodie/(?:timeline/)?(\d+)(?:_\d+)?\.(?:delta)?commit")
_HUDI_KEYS = ("deltastreamer.checkpoint.key", "streamer.checkpoint.key.v2")
Read = Callable[[str], str]


def stated(environment: Environment, name: str, checkpoint: str | None, topic: str) -> list[str]:
    """Return what a source's metadata states, a sentence each. Nothing is written. Raises Refused,
    Transient."""
    io = LakeFileIO(catalog_properties(environment))

    def listed(folder: str) -> tuple[dict[str, str], Read]:
        stored = {name: one.path for name, one in files_by_name(io, folder).items()}

        def read(file: str) -> str:
            with lake_errors(f"read {stored[file]}"), io.new_input(stored[file]).open() as source:
                return source.read().decode("utf-8", "replace")

        return stored, read

    found = list[str]()
    if checkpoint is not None:
        found += of_checkpoint(*listed(location_of(checkpoint)), topic)
    if "/" not in name:
        table = Lake(environment).find(name)
        return [*found, *(of_snapshots(table) if table is not None else ())]
    location = location_of(name)
    if location.endswith(".metadata.json"):
        return [*found, *of_snapshots(StaticTable.from_metadata(location, dict(io.properties)))]
    stored, read = listed(location)
    if (metadata := find_metadata(stored, location)) is not None:
        static = StaticTable.from_metadata(stored[metadata], dict(io.properties))
        found += of_snapshots(static)
    return [*found, *of_hudi(stored, read, topic)]


def of_checkpoint(names: Mapping[str, str], read: Read, topic: str) -> Iterator[str]:
    """Yield the end of the last micro-batch that a checkpoint of Spark committed."""
    numbers = {
        kind: {int(n) for n in (name.removeprefix(f"{kind}/") for name in names) if n.isdigit()}
        for kind in ("offsets", "commits")
    }
    if not numbers["offsets"]:
        yield "the checkpoint has no offsets: it was deleted, or the folder is another"
        return
    last = max(numbers["commits"], default=None)
    if last in numbers["offsets"]:
        ends = _topic_of(read(f"offsets/{last}").splitlines(), topic)
        state = _by_partition(ends) if ends else f"no offsets of topic {topic}"
        yield f"the checkpoint committed micro-batch {last}: {state}"
    begun = sorted(n for n in numbers["offsets"] if last is None or n > last)
    if begun:
        yield (
            f"the checkpoint began micro-batch {begun[-1]} and did not commit it: files of it may "
            "be in the folder"
        )


def _topic_of(lines: list[str], topic: str) -> dict[str, Any]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get(topic), dict):
            return dict(value[topic])
    return {}


def of_snapshots(table: Table) -> Iterator[str]:
    """Yield what the newest snapshot with such properties states."""
    snapshots = sorted(table.metadata.snapshots, key=lambda one: -one.timestamp_ms)
    for one in snapshots:
        properties = one.summary.additional_properties if one.summary is not None else {}
        if through := properties.get("kafka.connect.valid-through-ts"):
            yield f"snapshot {one.snapshot_id} of Kafka Connect has all records up to {through}"
        of_control = [name for name in properties if name.startswith("kafka.connect.offsets.")]
        for name in of_control:
            control = name.removeprefix("kafka.connect.offsets.").rpartition(".")[0]
            yield (
                f"snapshot {one.snapshot_id} of Kafka Connect states offsets of its control topic "
                f"{control}, and none of the records' topic"
            )
        if number := properties.get("flink.max-committed-checkpoint-id"):
            yield (
                f"snapshot {one.snapshot_id} is of Flink's checkpoint {number}, whose offsets only "
                "Flink's state has"
            )
        if through or of_control or number:
            return


def of_hudi(names: Mapping[str, str], read: Read, topic: str) -> Iterator[str]:
    """Yield the offsets that the newest commit of Hudi's streamer states."""
    commits = sorted((m[1], name) for name in names if (m := _HUDI.fullmatch(name)) is not None)
    for number, name in reversed(commits):
        try:
            metadata = json.loads(read(name)).get("extraMetadata", {})
        except (ValueError, AttributeError):
            continue
        for key in _HUDI_KEYS:
            of, *ends = str(metadata.get(key, "")).split(",")
            if of == topic:
                yield f"Hudi's commit {number} has all records up to {', '.join(ends)}"
                return


def _by_partition(ends: Mapping[str, Any]) -> str:
    return ", ".join(f"partition {p} up to offset {end}" for p, end in sorted(ends.items()))
