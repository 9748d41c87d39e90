"""The columns of streams with `schema: registry`, read from their tables and from the schema
registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.common.errors import NotYet
from anabranch.config import Environment, Stream
from anabranch.iceberg.register import register
from anabranch.iceberg.schema_evolution import plan_evolution
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.kafka.schema_registry import SubjectVersion, open_registry
from anabranch.subjects.plan import plan_columns, table_columns
from anabranch.subjects.whole_schema import read_descriptors

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

    from anabranch.iceberg.lake import Lake


@dataclass(frozen=True)
class Planned:
    """A stream with the columns that `apply` gives its table, and descriptions of the changes."""

    stream: Stream
    changes: tuple[str, ...] = ()


def with_table_columns(stream: Stream, lake: Lake) -> Stream:
    """Return the stream with the columns of its table. A stream with columns in its file is
    returned unchanged; one without a table still lacks columns. Raises ConfigurationError for
    columns that contradict the file, Transient."""
    if not stream.lacks_columns or not lake.exists(stream.table):
        return stream
    return with_columns_of(stream, lake.load(stream.table))


def with_columns_of(stream: Stream, table: Table) -> Stream:
    """Return a stream with `schema: registry` with the columns of this state of its table; any
    other stream unchanged. Raises ConfigurationError for columns that contradict the file."""
    if stream.subject_schema is None:
        return stream
    return stream.with_columns(table_columns(table.schema()))


def register_table(stream: Stream, lake: Lake) -> list[str]:
    """Register the table of a stream with `schema: registry` if storage has it and the catalog has
    lost it, so that a version of its subject is planned over its columns. Return descriptions of
    the changes; none for any other stream.

    Raises ConfigurationError if no metadata file is usable, Transient.
    """
    if not stream.lacks_columns:
        return []
    return register(lake, stream.table, rows_columns(stream).schema)


def plan_table(environment: Environment, stream: Stream, lake: Lake) -> Planned:
    """Plan the latest version of a stream's subject as `plan_version`; a stream with columns in its
    file is unchanged. Raises ConfigurationError for a descriptor file as which it cannot be
    read."""
    if stream.format.descriptor is not None:
        read_descriptors(stream)
    if stream.subject_schema is None:
        return Planned(stream)
    return plan_version(stream, open_registry(environment, stream).latest(stream.subject), lake)


def plan_version(stream: Stream, version: SubjectVersion | None, lake: Lake) -> Planned:
    """Plan the columns of a stream's table for a version of its subject. Changes nothing.

    Without a version a table keeps its columns. Raises Refused, with the field, for a version that
    the table cannot take up; NotYet for a new table without a subject; ConfigurationError,
    Transient.
    """
    have = lake.load(stream.table).schema() if lake.exists(stream.table) else None
    if version is None:
        if have is None:
            raise NotYet(
                f"stream {stream.name}: expected subject {stream.subject} in the schema registry, "
                "found none; register its schema, or name the subject: `format: {type: ..., "
                "subject: ...}`"
            )
        return Planned(stream.with_columns(table_columns(have)))
    planned = stream.with_columns(plan_columns(stream, version, have))
    return Planned(
        planned, _changes(planned, have, f"subject {version.subject} version {version.version}")
    )


def _changes(stream: Stream, have: Schema | None, source: str) -> tuple[str, ...]:
    if have is None:
        return (f"{source}: new table {stream.table} with {stream.ddl}",)
    changes = plan_evolution(stream.table, have, rows_columns(stream))
    return tuple(f"{source}: {change.plan_words(stream.table)}" for change in changes)
