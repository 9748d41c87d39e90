"""A stream's file that was rolled back: its table keeps the newer columns, and rows of the older
file fit into them. Columns are never removed, so an evolved table is ahead of the stream's earlier
file. `apply --rolled-back` records the columns of the restored file in a table property. Jobs with
exactly these columns continue, and their rows have null in newer columns. Any other job whose file
has fewer columns than the table stops.
"""

from __future__ import annotations

import json

from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import NestedField

from anabranch.common.errors import Refused
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.schema_evolution import Columns, plan_evolution, type_words
from anabranch.protocol.publish import new_id

ROLLED_BACK = "anabranch.rolled-back"


def column_words(f: NestedField | None) -> str:
    """Return a column's type as the stream's file writes it; `none` for no column."""
    return "none" if f is None else type_words(f.field_type) + (" NOT NULL" if f.required else "")


def columns_json(schema: Schema) -> str:
    """Return columns as the property lists them; their order does not matter."""
    return json.dumps({f.name: column_words(f) for f in schema.fields}, sort_keys=True)


def is_ahead(name: str, have: Schema, wanted: Columns) -> bool:
    """Whether rows of the wanted columns fit into a table: it has them, as wide or wider. Pure."""
    try:
        return bool(
            plan_evolution(
                name, wanted.schema, Columns(have, wanted.source, wanted.key, complete=True)
            )
        )
    except Refused:
        return False


def is_rolled_back(table: Table, wanted: Columns) -> bool:
    """Whether jobs with these columns may continue although the table has more."""
    return table.properties.get(ROLLED_BACK) == columns_json(wanted.schema)


def roll_back(lake: Lake, name: str, wanted: Columns) -> list[str]:
    """Record that the wanted columns are those of an older stream file; return a description of
    each change. Raises Refused for columns that the table never had, Transient."""
    table = lake.load(name)
    if is_rolled_back(table, wanted) or columns_json(table.schema()) == columns_json(wanted.schema):
        return []
    if not is_ahead(name, table.schema(), wanted):
        plan_evolution(name, table.schema(), wanted)
        raise Refused(
            f"table {name}, {wanted.source}: expected columns that the table has too, found more; "
            "run `anabranch apply` without --rolled-back"
        )
    _change(
        lake,
        name,
        Commit(new_id(), {}, (), set_properties={ROLLED_BACK: columns_json(wanted.schema)}),
    )
    have = {f.name: column_words(f) for f in table.schema().fields}
    older = {f.name: column_words(f) for f in wanted.schema.fields}
    newer = ", ".join(column for column, words in have.items() if older.get(column) != words)
    return [
        (
            f"left {name} unchanged, ahead of the stream's file in {newer}: new rows have null or "
            "narrower values there"
        )
    ]


def roll_forward(lake: Lake, name: str) -> list[str]:
    """Delete the record of a rolled-back file; return a text for each change. Raises Transient."""
    if ROLLED_BACK not in lake.load(name).properties:
        return []
    # PyIceberg fails to remove a key that another process, or a lost request, has already removed.
    gone = Commit(
        new_id(), {}, (), set_properties={ROLLED_BACK: ""}, remove_properties=(ROLLED_BACK,)
    )
    _change(lake, name, gone)
    return [f"{name} is no longer ahead of the stream's file"]


def _change(lake: Lake, name: str, commit: Commit) -> None:
    lake.commit_until_landed(name, f"change the properties of {name}", lambda _: commit)
