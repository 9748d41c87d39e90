"""The tree of the fields of JSON values that columns read, and the fields that no column reads.

A field's name is its path, with `[]` for the items of an array and `{}` for the values of a map:
`payload.after.name`, `items[].n`, `labels{}.n`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import UNSET, Raw

from anabranch.config.columns import Column
from anabranch.decode.values import arrow_type

REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of a value of another type, a number out of range, bytes that are not UTF-8, or more
nesting than Python has room for."""


class Node:
    """A node of the tree: its columns read fields of objects, or the `items` of arrays or maps.
    `fields`: the node of each, or None where a column takes whatever there is. `others`: further
    fields, as records have taught. `is_raw`: its values are not decoded, and teach nothing."""

    def __init__(self, path: str = "", items: Node | None = None) -> None:
        self.path, self.items, self.is_raw = path, items, False
        self.fields: dict[str, Node | None] = {}
        self.others: list[str] = []

    def name_of(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def every(self) -> Iterator[tuple[str, Node | None]]:
        """Yield the name of each node below, with the node."""
        of_items = [] if self.items is None else [(self.items.path, self.items)]
        named = [(self.name_of(name), node) for name, node in self.fields.items()]
        for name, node in [*of_items, *named]:
            yield name, node
            if node is not None:
                yield from node.every()

    def has_others(self) -> bool:
        """Return whether records have taught fields here or below."""
        below = [self.items, *self.fields.values()]
        return bool(self.others) or any(one is not None and one.has_others() for one in below)


Field = tuple[Node, str]
Others = dict[Field, Raw]
"""Fields without a column, by node and name, with a value of each."""


def tree_of(columns: Iterable[Column]) -> Node:
    """Return the tree of a record's columns. Pure."""
    root = Node()
    for column in columns:
        node, names = root, column.field
        for depth, name in enumerate(names, 1):
            path, is_first = node.name_of(name), name not in node.fields
            if depth == len(names):
                here = _of_type(path, arrow_type(column.type))
                node.fields[name] = here if is_first else _both(node.fields[name], here)
            elif is_first:
                node.fields[name] = Node(path)
            if (below := node.fields[name]) is None:
                break
            node = below
    return root


def _of_type(path: str, kind: pa.DataType) -> Node | None:
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        is_list = pa.types.is_list(kind)
        items = _of_type(
            f"{path}{'[]' if is_list else '{}'}", kind.value_type if is_list else kind.item_type
        )
        return None if items is None else Node(path, items)
    if not pa.types.is_struct(kind):
        return None
    node = Node(path)
    node.fields = {field.name: _of_type(node.name_of(field.name), field.type) for field in kind}
    return node


def _both(one: Node | None, other: Node | None) -> Node | None:
    """Return the node of a field that several columns read: what one of them reads is known."""
    if one is None or other is None:
        return None
    if one.items is not None:
        one.items = _both(one.items, other.items)
        return one if one.items is not None else None
    for name, node in other.fields.items():
        one.fields[name] = _both(one.fields[name], node) if name in one.fields else node
    return one


def unread_part(sent: bytes | Raw, node: Node, found: Others) -> Any:
    """Return what no column reads of a value, in its shape (a list has None for items without such
    fields), or None. Add these fields to `found`."""
    try:
        value = _NESTED.decode(sent)
    except REFUSED:
        # Null, or a value of another type: an error of its column.
        return None
    if isinstance(value, list):
        items = [unread_part(one, node.items, found) for one in value] if node.items else []
        return items if any(items) else None
    left = dict[str, Any]()
    for name, raw in value.items():
        below = node.items or node.fields.get(name)
        if below is not None:
            left[name] = unread_part(raw, below, found)
        elif name not in node.fields:
            found[node, name] = left[name] = raw
    return {name: one for name, one in left.items() if one is not None} or None


def as_json(left: Any) -> str:
    """Return what is left of a record as JSON, with the names in alphabetical order."""
    # The characters of Raw may be no UTF-8; the record has an error as a whole then.
    return msgspec.json.encode(left, order="deterministic").decode(errors="replace")


def names_below(
    node: Node, at: Sequence[int], objects: Sequence[Any]
) -> Iterator[tuple[str, set[int]]]:
    """Yield each field without a column below a node of decoded objects (`object_type`), and the
    numbers of the records with it. `at`: the number of each object's record."""
    for n, below in enumerate(node.fields.values()):
        if below is None or not (below.is_raw or below.has_others()):
            continue
        inside, here = list(map(attrgetter(f"c{n}"), objects)), at
        if below.is_raw:
            found: dict[Field, set[int]] = {}
            decode = msgspec.json.Decoder(_known(below)).decode
            for i, raw in zip(here, inside, strict=True):
                others = Others()
                if raw is not None and _has_others(decode, raw):
                    unread_part(raw, below, others)
                for field in others:
                    found.setdefault(field, set()).add(i)
            yield from ((of.name_of(name), records) for (of, name), records in found.items())
            continue
        while below.items is not None:
            below = below.items
            inside = [list(one.values()) if type(one) is dict else one for one in inside]
            here = [i for i, one in zip(here, inside, strict=True) for _ in one or ()]
            inside = [item for one in inside for item in one or ()]
        here = [i for i, one in zip(here, inside, strict=True) if one is not None]
        inside = [one for one in inside if one is not None]
        for k, name in enumerate(below.others):
            values = zip(here, map(attrgetter(f"u{k}"), inside), strict=True)
            yield below.name_of(name), {i for i, value in values if value is not UNSET}
        yield from names_below(below, here, inside)


def _known(node: Node | None) -> Any:
    """Return msgspec's type of values without fields beside those that columns read."""
    if node is None:
        return Raw
    if node.items is not None:
        item = _known(node.items)
        return list[item] | dict[str, item] | None  # type: ignore[valid-type]
    return object_type({name: _known(one) for name, one in node.fields.items()}, node) | None


def _has_others(decode: Callable[[Raw], Any], raw: Raw) -> bool:
    try:
        decode(raw)
    except REFUSED:
        return True
    return False


def object_type(types: Mapping[str, Any], node: Node | None = None) -> Any:
    """Return msgspec's type of objects with fields of these types, by name. Its attributes are c0,
    c1 and so on, in their order, and u0, u1 for the node's `others`. With a node it refuses any
    other field."""
    others = node.others if node is not None else []
    names = {f"c{i}": name for i, name in enumerate(types)}
    learned = {f"u{i}": name for i, name in enumerate(others)}
    return msgspec.defstruct(
        "Object",
        [(attribute, types[name], None) for attribute, name in names.items()]
        + [(attribute, Raw, UNSET) for attribute in learned],
        rename=names | learned,
        forbid_unknown_fields=node is not None,
        gc=False,
    )


_NESTED = msgspec.json.Decoder(list[Raw] | dict[str, Raw])
