"""Print unknown fields."""

from __future__ import annotations

import json

from anabranch.common.output import print_json, print_table, text
from anabranch.operations.reports.drift import DriftedField, SchemaDrift


def print_drift(view: SchemaDrift, output: str) -> None:
    """Print one line for each field, then the change of the stream's file and the commands to
    run."""
    if output == "json":
        print_json(view)
        return
    if not view.fields:
        print(f"{view.stream}: no unknown fields in the hours that were counted")
        return
    print_table(
        ("field", "records", "hours", "first hour", "last hour", "type", "samples", "note"),
        [
            (
                f.name,
                f.records,
                f.hours,
                f.first_hour,
                f.last_hour,
                f.type or "",
                ", ".join(f.samples),
                _note(f),
            )
            for f in view.fields
        ],
    )
    if view.others:
        print(f"\nand up to {view.others} more names in an hour, which are not counted by name")
    if view.schema is not None:
        print(
            f"\nTo add the fields, change the file of stream {view.stream} (the types are "
            "guesses):\n"
        )
        print(f"schema: {json.dumps(view.schema)}")
    if view.commands:
        print("\nThen run in order:\n")
        print("\n".join(view.commands))
    if view.gone:
        print(
            f"\nKafka no longer has all records of {text(', '.join(view.gone))}: their rows stay "
            "without the fields."
        )


def _note(field: DriftedField) -> str:
    return field.obstacle or ("in the schema now: restate its hours" if field.taken_up else "")
