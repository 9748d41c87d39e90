"""The formats of a source's files: Parquet, ORC, JSON lines, CSV with a header, Avro. Lines are
read by the decoder of records, with the same verdicts.

And statements of another program about the records in its table: the offsets of Spark's checkpoint,
and properties of snapshots and commits. The rows' own offsets prove more.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.orc as orc
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable, Table

from anabranch.common.arrays import grouped, groups_by_size
from anabranch.common.errors import AnabranchError, Refused, installed
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Environment, Stream
from anabranch.config.columns import Column, Notation
from anabranch.decode import Decoder, DecodeSpec
from anabranch.decode.csv import split
from anabranch.decode.values import arrow_type
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.files import Stored, files_by_name
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.other_tables import (
    FilePart,
    MakeParts,
    Part,
    find_metadata,
    folder_values,
    location_of,
    parquet_parts,
)
from anabranch.subjects.columns import NotAColumn, avro_fields
from serving_layer.query.place_columns import FAMILIES

FORMS = ("parquet", "orc", "json", "csv", "avro")
TABLES = ("delta", "iceberg")
_BY_ENDING = {f".{form}": form for form in FORMS} | {".jsonl": "json", ".ndjson": "json"}
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_NUMBERS = {int: "bigint"}
_PLACES = {family.format(one).lower() for family in FAMILIES for one in ("partition", "offset")}
_TOPICS = {family.format("topic").lower() for family in FAMILIES}
_LINES = 20_000
_BYTES = 32 * 2**20
_BUFFER = 2**20


def split_form(text: str) -> tuple[str | None, str]:
    """Return the format and the place of a source, `[FORMAT:]PATH|TABLE`. Pure."""
    form, _, place = text.partition(":")
    return (form, place) if form in (*FORMS, *TABLES) else (None, text)


def maker(form: str | None, stream: Stream) -> MakeParts:
    """Return how to open a folder's files: of a format, or of those that their names state."""
    return partial(_make, form if form in FORMS else None, stream)


def _make(
    form: str | None, stream: Stream, access: FileIO, stored: Stored, name: str
) -> Sequence[Part]:
    known = form or _form_of(name)
    if known == "parquet":
        return parquet_parts(access, stored, name)
    folder = folder_values(name)
    columns = tuple(
        replace(column, path=(), notation=Notation(), rescues=False) for column in stream.columns
    )
    if known == "orc":
        return [OrcPart(access, stored.path, folder)]
    if known == "avro":
        return [AvroPart(access, stored.path, folder)]
    if known not in ("json", "csv"):
        raise Refused(
            f"import {stored.path}: expected a name that ends like its format "
            f"({', '.join(sorted(_BY_ENDING))}), found {name}; name a folder of these alone, or "
            f"the format: --from FORMAT:{stored.path.removesuffix(name)}"
        )
    delimiter = stream.format.delimiter if known == "csv" else ","
    return [TextPart(access, stored.path, folder, known, columns, delimiter)]


def open_stream(access: FileIO, path: str) -> Any:
    """Open a file, of any size. Files of our tables with some names are read whole."""
    if isinstance(access, PyArrowFileIO):
        return PyArrowFileIO.new_input(access, path).open()
    return access.new_input(path).open()


def _text(name: str) -> str:
    """Return the type of a text that is no column of the stream, by its name. Pure."""
    return "string" if name.lower() in _PLACES | _TOPICS else "timestamp"


def _form_of(name: str) -> str | None:
    path = PurePath(name)
    ending = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    return _BY_ENDING.get(ending)


@dataclass(frozen=True)
class OrcPart(FilePart):
    def own_schema(self) -> pa.Schema:
        schema: pa.Schema = self._open().schema
        return schema

    def own_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        opened = self._open()
        own = [name for name in columns if name in opened.schema.names]
        for stripe in range(opened.nstripes):
            for batch in pa.table(opened.read_stripe(stripe, own)).to_batches(batch_size):
                yield batch.select(own)

    def _open(self) -> Any:
        try:
            return orc.ORCFile(self.io.new_input(self.path).open())
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and "ORC" not in str(error):
                raise
            raise Refused(
                f"read {self.path}: expected a complete ORC file, found {error}; remove it, or "
                "write it again"
            ) from error


@dataclass(frozen=True)
class AvroPart(FilePart):
    """A file of Avro's container format."""

    def own_schema(self) -> pa.Schema:
        with self._opened() as rows:
            text = json.dumps(rows.writer_schema)
        try:
            if "timestamp-nanos" in text:
                raise NotAColumn("", "timestamps of at most microseconds", "timestamp-nanos")
            fields = avro_fields(text)
        except NotAColumn as error:
            raise Refused(f"read {self.path}: {error}; write its rows as Parquet files") from error
        return pa.schema([(name, arrow_type(kind)) for name, kind in fields])

    def own_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = self.own_schema()
        wanted = [schema.field(name) for name in columns if name in schema.names]
        with self._opened() as rows:
            while block := list(itertools.islice(rows, min(batch_size, _LINES))):
                yield pa.record_batch(
                    [self._column(column, block) for column in wanted], pa.schema(wanted)
                )

    def _column(self, column: pa.Field, block: Sequence[dict[str, Any]]) -> pa.Array:
        try:
            return pa.array([row[column.name] for row in block], column.type)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise Refused(
                f"read {self.path}: column {column.name}: expected {column.type}, found {error}; "
                "write its rows as Parquet files"
            ) from error

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        expected = "the package fastavro to read Avro files"
        with installed(f"read {self.path}", expected, "anabranch[avro]"):
            import fastavro
        with open_stream(self.io, self.path) as stored:
            try:
                yield fastavro.reader(io.BufferedReader(stored, _BUFFER))
            except Exception as error:
                # A damaged file raises any error, of its codec too: bzip2's are OSErrors.
                is_damage = "data stream" in str(error) or not isinstance(error, OSError)
                if isinstance(error, AnabranchError | MemoryError) or not is_damage:
                    raise
                raise Refused(
                    f"read {self.path}: expected a complete Avro file, found {error!r}; remove it, "
                    "or write it again"
                ) from error


@dataclass(frozen=True)
class TextPart(FilePart):
    """A file of JSON lines, or of CSV with a header, also compressed: each line is read as a record
    in the stream's `columns`. Fields of the first line that are no columns may be times, places and
    topics: other text is a time, an integer of JSON a number.

    Reading raises Refused, with the line, for one that is no row of the table.
    """

    form: str
    columns: tuple[Column, ...]
    delimiter: str

    @property
    def is_empty(self) -> bool:
        """Whether there is no line, and so no column: Spark's first task writes such a file."""
        with lake_errors(f"read {self.path}"):
            return next(self._lines(), None) is None

    def own_schema(self) -> pa.Schema:
        return pa.schema([(c.name, arrow_type(c.type)) for c in self._columns()[0]])

    def _columns(self) -> tuple[list[Column], list[str]]:
        """Return the file's columns, and the names in its first line."""
        number, line = next(self._lines(), (1, b""))
        kinds = self._kinds(number, line)
        by_letters = grouped(kinds, str.lower)
        in_folder = {name.lower() for name in self.folder}
        own, there = list[Column](), set[str]()
        for column in self.columns:
            # As in other files, in letters of any case (`SourceReader`).
            equal = (
                [column.name] if column.name in kinds else by_letters.get(column.name.lower(), [])
            )
            if len(equal) > 1:
                raise self._refused(number, f"one field {column.name}", ", ".join(equal))
            if equal:
                own.append(replace(column, path=(equal[0],)))
                there.add(equal[0])
            elif self.form == "json" and column.name.lower() not in in_folder:
                own.append(column)
        if self.form == "json" and kinds and own and not there:
            # All values would be null, as of records that were never decoded.
            names = ", ".join(column.name for column in own)
            raise self._refused(number, f"a field of {names}", ", ".join(kinds))
        others = [
            Column(name, kind, True)
            for name, kind in kinds.items()
            if kind is not None and name not in there
        ]
        return [*own, *others], list(kinds)

    def _kinds(self, number: int, line: bytes) -> dict[str, str | None]:
        """Return the fields of the first line, with their type if they are no columns."""
        if self.form == "csv":
            text = line.decode("utf-8", "replace").rstrip("\r\n").removeprefix("\ufeff")
            names = [name or "" for name in split(text, self.delimiter) or ()]
            if line and ("" in names or len({*names}) < len(names) or not names):
                raise self._refused(number, "a header with a name for each field", text)
            return {name: "bigint" if name.lower() in _PLACES else _text(name) for name in names}
        try:
            found = msgspec.json.decode(line or b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._refused(number, "an object of JSON", str(error)) from error
        if not isinstance(found, dict):
            raise self._refused(number, "an object of JSON", type(found).__name__)
        return {
            name: _text(name) if isinstance(value, str) else _NUMBERS.get(type(value))
            for name, value in found.items()
        }

    def own_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        own, names = self._columns()
        table = {column.name for column in self.columns}
        # Each column of the table is checked, whichever are requested.
        read = tuple(column for column in own if column.name in table or column.name in columns)
        spec = DecodeSpec(read, None, self.form, delimiter=self.delimiter, header=tuple(names))
        decoder, lines = Decoder(spec), self._lines(skip=self.form == "csv")
        for block in groups_by_size(
            lines, lambda one: len(one[1]), _BYTES, min(batch_size, _LINES)
        ):
            yield self._decoded(decoder, block, columns)

    def _decoded(
        self, decoder: Decoder, block: Sequence[tuple[int, bytes]], columns: Sequence[str]
    ) -> pa.RecordBatch:
        n = len(block)
        batch = pa.record_batch(
            {
                "key": pa.nulls(n, pa.binary()),
                "value": pa.array([line for _, line in block], pa.binary()),
                "partition": pa.repeat(pa.scalar(0, pa.int32()), n),
                "offset": pa.array([number for number, _ in block], pa.int64()),
                "timestamp": pa.nulls(n, pa.timestamp("us", "UTC")),
                "headers": pa.nulls(n, pa.string()),
                "ingest_hour": pa.repeat("1970-01-01T00", n),
            }
        )
        decoded = decoder.decode(batch)
        if decoded.errors:
            first = min(decoded.errors)
            raise self._refused(block[first][0], "a row of the table", decoded.errors[first][1])
        own = [name for name in columns if name in decoded.rows.column_names]
        rows = decoded.rows.select(own).combine_chunks()
        return pa.RecordBatch.from_arrays([c.chunk(0) for c in rows.columns], own)

    def _lines(self, skip: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers from 1; `skip` the first one."""
        number, parts, begun, quotes, size = 0, list[bytes](), 0, 0, 0
        with open_stream(self.io, self.path) as stored:
            try:
                for line in self._buffered(stored):
                    number += 1
                    if not parts and not line.strip():
                        continue
                    begun = begun if parts else number
                    parts.append(line)
                    quotes, size = quotes + line.count(b'"'), size + len(line)
                    # A quoted field may have line breaks.
                    if self.form == "csv" and quotes % 2:
                        if size > _BYTES:
                            break
                        continue
                    if not skip:
                        yield begun, b"".join(parts).rstrip(b"\r\n")
                    parts, skip, quotes, size = [], False, 0, 0
            except (OSError, pa.ArrowInvalid) as error:
                if not self.path.endswith(_COMPRESSED):
                    raise
                raise self._refused(number + 1, "a complete file", str(error)) from error
        if parts:
            raise self._refused(begun, "a line of CSV", "a quote that is not closed")

    def _buffered(self, stored: Any) -> Any:
        if not self.path.endswith(_COMPRESSED):
            return io.BufferedReader(stored, _BUFFER)
        codec = pa.Codec.detect(self.path).name
        return io.BufferedReader(pa.CompressedInputStream(stored, codec), _BUFFER)

    def _refused(self, line: int, expected: str, found: str) -> Refused:
        return Refused(
            f"import {self.path}: line {line}: expected {expected}, found {found[:200]}; correct "
            "the line, or remove it"
        )


_HUDI = re.compile(r"\.hoodie/(?:timeline/)?(\d+)(?:_\d+)?\.(?:delta)?commit")
_HUDI_KEYS = ("deltastreamer.checkpoint.key", "streamer.checkpoint.key.v2")
Read = Callable[[str], str]


def stated(environment: Environment, name: str, checkpoint: str | None, topic: str) -> list[str]:
    """Return what a source's metadata states, a sentence each. Raises Refused, Transient."""
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
