"""JSON lines files as the source of an import: one object a line, read in the columns of a
table."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from anabranch.common.errors import Refused

if TYPE_CHECKING:
    from pyiceberg.io import FileIO

_NAME = re.compile(r".*\.(json|jsonl|ndjson)(\.gz)?")
_BLOCK_BYTES = 32 * 2**20
_OTHERS = {str: pa.timestamp("us", "UTC"), int: pa.int64()}
"""The types of fields that are not columns, by the Python type of their value."""


def is_json_lines(name: str) -> bool:
    """Return whether a file name is that of a JSON lines file, with or without gzip."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class JsonLines:
    """A JSON lines file. `columns`: those of the table; a column is null in lines without it.
    Columns in `elsewhere` are read only if the first line has them. A time without a time zone is
    UTC.

    Reading raises Refused, with the line number, for a line that is not an object or has other
    types; Refused for a column type that JSON lacks; Transient.
    """

    io: FileIO
    path: str
    columns: pa.Schema
    elsewhere: Collection[str] = ()

    @cached_property
    def schema_arrow(self) -> pa.Schema:
        """The columns, then the first line's other text and integer fields: they may be times,
        partitions or offsets."""
        first = self._first()
        columns = [
            field
            for field in self.columns
            if field.name in first or field.name not in self.elsewhere
        ]
        if odd := next((field for field in columns if not _is_of_json(field.type)), None):
            raise Refused(
                f"import {self.path}: column {odd.name}: expected a type that values of JSON "
                f"have, found {odd.type}; write the rows as Parquet files to another folder and "
                "import that"
            )
        others = {
            name: _OTHERS.get(type(value))
            for name, value in first.items()
            if name not in self.columns.names
        }
        return pa.schema(
            [*columns, *((name, kind) for name, kind in others.items() if kind is not None)]
        )

    def _first(self) -> dict[str, Any]:
        for number, line in self._lines():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._refused(number, str(error)) from error
            if not isinstance(found, dict):
                raise self._refused(number, type(found).__name__)
            return found
        return {}

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of lines with some columns. Checks every column of the table, whichever are
        requested."""
        names = {*columns, *self.columns.names}
        wanted = pa.schema([field for field in self.schema_arrow if field.name in names])
        block: list[tuple[int, bytes]] = []
        size = 0
        for number, line in self._lines():
            block.append((number, line))
            size += len(line)
            if len(block) == batch_size or size >= _BLOCK_BYTES:
                yield self._parse_block(block, wanted).select(columns)
                block, size = [], 0
        if block:
            yield self._parse_block(block, wanted).select(columns)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers from 1."""
        number = 0
        with self.io.new_input(self.path).open() as stored:
            raw: Any = stored
            try:
                for line in (
                    gzip.GzipFile(fileobj=raw)
                    if self.path.endswith(".gz")
                    else io.BufferedReader(raw)
                ):
                    number += 1
                    if line.strip():
                        yield number, line
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise self._refused(number + 1, f"an incomplete gzip file ({error})") from error

    def _parse_block(self, block: Sequence[tuple[int, bytes]], wanted: pa.Schema) -> pa.RecordBatch:
        try:
            return _parse([line for _, line in block], wanted)
        except ValueError:
            for number, line in block:
                try:
                    _parse([line], wanted)
                except ValueError as error:
                    raise self._refused(number, str(error).replace(" in row 0", "")) from error
            raise

    def _refused(self, line: int, found: str) -> Refused:
        return Refused(
            f"import {self.path}: line {line}: expected an object of JSON with the table's "
            f"columns, found {found}; correct the line, or remove it"
        )


def _parse(lines: Sequence[bytes], wanted: pa.Schema) -> pa.RecordBatch:
    """Return lines as columns. Raises ValueError (also as its subclass ArrowInvalid) if a line is
    not one object of these types."""
    text = b"".join(line.rstrip(b"\r\n") + b"\n" for line in lines)
    text.decode()
    read = pa.schema([(field.name, _as_read(field.type)) for field in wanted])
    found = pj.read_json(
        io.BytesIO(text),
        pj.ReadOptions(use_threads=False, block_size=len(text)),
        pj.ParseOptions(
            explicit_schema=read, newlines_in_values=False, unexpected_field_behavior="ignore"
        ),
    )
    if len(found) != len(lines):
        raise ValueError(f"{len(found)} objects in {len(lines)} lines")
    columns = [pc.cast(found[field.name], field.type) for field in wanted]
    for field, column in zip(wanted, columns, strict=True):
        if column.null_count and not field.nullable:
            raise ValueError(f"no {field.name}")
    return pa.table(columns, wanted).combine_chunks().to_batches()[0]


def _as_read(kind: pa.DataType) -> pa.DataType:
    """Return the type in which PyArrow's JSON reader reads a table's type."""
    t = pa.types
    if t.is_large_string(kind) or t.is_date(kind):
        return pa.string()
    if t.is_large_list(kind) or t.is_list(kind):
        return pa.list_(_as_read(kind.value_type))
    if t.is_struct(kind):
        return pa.struct([(field.name, _as_read(field.type)) for field in kind])
    return kind


def _is_of_json(kind: pa.DataType) -> bool:
    """Return whether JSON has one form for values of a type; writers use several for bytes and
    maps."""
    t = pa.types
    if t.is_list(kind) or t.is_large_list(kind):
        return _is_of_json(kind.value_type)
    if t.is_struct(kind):
        return all(_is_of_json(field.type) for field in kind)
    return not (
        t.is_map(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
        or t.is_fixed_size_binary(kind)
    )
