"""The list of schema ids that later queries reuse, without Spark."""

from __future__ import annotations

from typing import Any, cast

from pyspark.sql import DataFrame

from anabranch.kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
from anabranch.records.formats.wire import MOST_KEPT, Wire


class Registry:
    """A registry that has every schema."""

    def schema(self, schema_id: int) -> RegisteredSchema:
        return RegisteredSchema(schema_id, "JSON", "{}", False)


class Records:
    """Records with these schema ids. `listed`: how often they were queried for them."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.listed = ids, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def collect(self) -> list[tuple[int]]:
        self.listed += 1
        return [(id,) for id in self.ids]


def ids_of(wire: Wire, records: Records) -> list[int]:
    return sorted(wire.look_up(cast(DataFrame, records)).schemas)


def new_wire() -> Wire:
    return Wire(cast(SchemaRegistryClient, Registry()), "JSON", None, True)


def test_ids_listed_before_stay_listed() -> None:
    """The hazard: producers with two schemas, in turn, make each second micro-batch fail."""
    wire, old, new = new_wire(), Records(1), Records(2)
    assert ids_of(wire, old) == [1]
    assert ids_of(wire, new) == [1], "reused; Spark fails at the other id"
    wire.list_again()
    assert ids_of(wire, new) == ids_of(wire, old) == [1, 2]
    assert (old.listed, new.listed) == (1, 1)


def test_the_list_is_bounded() -> None:
    wire = new_wire()
    for id in range(1, MOST_KEPT + 2):
        ids_of(wire, Records(id))
        wire.list_again()
        assert len(ids_of(wire, Records(id))) <= MOST_KEPT
        wire.list_again()
    assert ids_of(wire, Records(7)) == [7, MOST_KEPT + 1]
