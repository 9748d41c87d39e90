"""Fields without a column inside the objects that columns read: named by their path."""

import json
from typing import Any

import pytest
from budget import budget
from cases import codes, decoded, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.decode import WriterSchema
from anabranch.decode.json import MOST_LEARNED

DDL = "id STRING, s STRUCT<a: INT, t: STRUCT<b: STRING>>, items ARRAY<STRUCT<n: INT>>, m MAP<STRING, ARRAY<STRUCT<n: INT>>>"
SENT: dict[str, Any] = {
    "id": {"any": {"value": 1}},
    "s": {"a": 1, "t": {"b": {"c": 1}, "x": {"y": 1}}, "z": None},
    "items": [{"n": 1}, None, {"n": 2, "x": 5, "y": "é"}, {"x": 6}],
    "m": {"k": [{}, {"n": 1, "x": []}], "x": None},
    "top": 1,
}
NAMES = ["items[].x", "items[].y", "m{}[].x", "s.t.x", "s.z", "top"]
LEFT = {
    "s": {"t": {"x": {"y": 1}}, "z": None},
    "items": [None, None, {"x": 5, "y": "é"}, {"x": 6}],
    "m": {"k": [None, {"x": []}]},
    "top": 1,
}


@pytest.mark.parametrize("form", ["json", "json_schema"])
def test_nested_fields_are_listed_kept_and_refused_by_their_path(form: str) -> None:
    head, schemas = (b"", {}) if form == "json" else (b"\0\0\0\0\1", {1: WriterSchema("{}")})
    known = head + b'{"id":"a","s":{"a":1,"t":{"b":"c"}},"items":[{"n":1}],"m":{"k":[{"n":2}]}}'
    values = [known, head + json.dumps(SENT).encode(), known, head + json.dumps(SENT).encode()]
    given = {"form": form, "schemas": schemas, "lists_unknown": True}
    result = decoded(spec_of(DDL, **given, rescued="rescued"), values)
    assert not result.errors and result.unknown == {1: NAMES, 3: NAMES}
    kept = result.rows["rescued"].to_pylist()
    assert kept[::2] == [None, None] and [json.loads(one) for one in kept[1::2]] == [LEFT] * 2
    plain = decoded(spec_of(DDL, form, schemas=schemas), values)
    assert not plain.errors and not plain.unknown
    assert plain.rows.equals(result.rows.drop_columns("rescued"))
    refused = decoded(spec_of(DDL, form, schemas=schemas, refuses_unknown=True), values)
    text = f"expected no fields beside those of the schema, found {', '.join(NAMES)}"
    assert refused.errors == {1: ("unknown_field", text), 3: ("unknown_field", text)}


def test_fields_beside_those_on_a_columns_path() -> None:
    schema = {
        "id": {"type": "INT", "from": "payload.after.id"},
        "of": {"type": "STRUCT<a: INT>", "from": "payload.of"},
        # Two columns of one field: what neither reads has no column.
        "a": {"type": "INT", "from": "two.one.a"},
        "one": {"type": "STRUCT<b: INT>", "from": "two.one"},
        "whole": {"type": "STRING", "from": "text"},
        "part": {"type": "INT", "from": "text.n"},
    }
    spec = spec_of(schema, lists_unknown=True, rescued="rescued")
    sent = [
        {"payload": {"after": {"id": 1, "name": "x"}, "of": {"a": 1, "c": 2}, "op": "c"}},
        {"two": {"one": {"a": 1, "b": 2, "c": 3}, "x": 4}, "text": {"n": 1, "m": 2}},
        {"payload": {"after": None}, "two": {"one": {"a": 1, "b": 2}}},
        {"payload": {"after": 5}, "two": {"y": 5}},
    ]
    values = [json.dumps(one).encode() for one in sent]
    # A byte order mark has each record read field by field, which must teach nothing wrong.
    result = decoded(spec, [*values, *[b"\xef\xbb\xbf" + one for one in values], *values])
    of_payload = ["payload.after.name", "payload.of.c", "payload.op"]
    names = [of_payload, ["two.one.c", "two.x"], [], ["two.y"]]
    assert [[*result.unknown.get(i, ())] for i in range(12)] == names * 3
    kept = result.rows["rescued"].to_pylist()
    assert [None if one is None else json.loads(one) for one in kept] == 3 * [
        {"payload": {"after": {"name": "x"}, "of": {"c": 2}, "op": "c"}},
        {"two": {"one": {"c": 3}, "x": 4}},
        None,
        {"two": {"y": 5}},
    ]
    assert codes(result) == dict.fromkeys((3, 7, 11), "wrong_type")


def test_more_nested_fields_than_are_learned_are_listed_too() -> None:
    names = [f"x{i:03}" for i in range(MOST_LEARNED + 10)] + ['x"', "x\n"]
    values = [{"items": [{"n": 1}, {n: 1}], "y": 2} for n in names]
    result = decoded(spec_of("items ARRAY<STRUCT<n: INT>>", lists_unknown=True), [*values, *values])
    assert result.unknown == {i: [f"items[].{n}", "y"] for i, n in enumerate([*names, *names])}
    assert result.rows["items"].to_pylist() == [[{"n": 1}, {"n": None}]] * len(values) * 2


def test_of_a_repeated_name_the_last_value_counts() -> None:
    values = [b'{"s":{"x":1},"s":{"a":1}}', b'{"s":{"a":1},"s":{"a":2,"x":1,"x":2}}']
    spec = spec_of("s STRUCT<a: INT>", lists_unknown=True, rescued="rescued")
    for sent in (values, values[::-1], values * 3):
        result = decoded(spec, sent)
        last = [i for i, one in enumerate(sent) if one == values[1]]
        assert result.unknown == {i: ["s.x"] for i in last}
        assert [result.rows["rescued"][i].as_py() for i in last] == ['{"s":{"x":2}}'] * len(last)


def test_a_name_that_is_also_a_path_hides_no_field() -> None:
    sent = [{"s": {"a": 1, "b": 2}, "s.b": 3, **more} for more in ({}, {'not learned"': 1})]
    values = [json.dumps(one).encode() for one in sent]
    values += [b"\xef\xbb\xbf" + one for one in values]
    result = decoded(spec_of("s STRUCT<a: INT>", lists_unknown=True, rescued="rescued"), values)
    assert all("s.b" in result.unknown[i] for i in range(len(values)))
    kept, left = result.rows["rescued"].to_pylist(), {"s": {"b": 2}, "s.b": 3}
    assert [json.loads(one) for one in kept] == [left, left | {'not learned"': 1}] * 2


Shape = Any
"""A type: INT or STRING, a list of one type, a one-tuple (a map of it), a mapping of fields."""


def ddl_of(shape: Shape) -> str:
    match shape:
        case str():
            return shape
        case [inner] if isinstance(shape, list):
            return f"ARRAY<{ddl_of(inner)}>"
        case (inner,):
            return f"MAP<STRING, {ddl_of(inner)}>"
    return f"STRUCT<{', '.join(f'{name}: {ddl_of(of)}' for name, of in shape.items())}>"


SHAPES = st.recursive(
    st.sampled_from(["INT", "STRING"]),
    lambda inner: (
        inner.map(lambda one: [one])
        | inner.map(lambda one: (one,))
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), SHAPES, min_size=1, max_size=3)
OTHER = st.sampled_from([None, 1, {"a": [1]}])
OTHERS = st.dictionaries(st.sampled_from(["A", "d", "e.f", ""]), OTHER, max_size=2)


def values_of(shape: Shape) -> st.SearchStrategy[Any]:
    match shape:
        case "INT":
            return st.none() | st.integers(0, 9)
        case "STRING":
            return st.sampled_from([None, "x", 5, {"a": 1, "z": 2}])
        case [inner] if isinstance(shape, list):
            return st.none() | st.lists(values_of(inner), max_size=3)
        case (inner,):
            return st.none() | st.dictionaries(st.sampled_from("kz"), values_of(inner), max_size=2)
    known = st.fixed_dictionaries({}, optional={name: values_of(of) for name, of in shape.items()})
    return st.none() | st.builds(lambda one, other: {**other, **one}, known, OTHERS)


def split(value: Any, shape: Shape, path: str) -> tuple[Any, Any, set[str]]:
    """A value without the fields that its type lacks; these, or None; and their names."""
    if value is None or isinstance(shape, str):
        return value, None, set()
    if isinstance(shape, list):
        parts = [split(one, shape[0], f"{path}[]") for one in value]
        left = [rest for _, rest, _ in parts]
        names = set().union(*(found for *_, found in parts))
        return [known for known, *_ in parts], left if names else None, names
    each = [
        (name, *split(one, shape[0], f"{path}{{}}"))
        if isinstance(shape, tuple)
        else (name, *split(one, shape[name], f"{path}.{name}"))
        if name in shape
        else (name, ..., one, {f"{path}.{name}"})
        for name, one in value.items()
    ]
    names = set().union(*(found for *_, found in each))
    left = {name: rest for name, _, rest, found in each if found}
    return {n: known for n, known, *_ in each if known is not ...}, left if names else None, names


@settings(max_examples=budget(60, 1_500), deadline=None)
@given(st.data())
def test_nested_values_of_any_type(data: st.DataObject) -> None:
    shape = data.draw(OBJECTS)
    objects = data.draw(st.lists(values_of(shape).filter(lambda one: one is not None), max_size=6))
    ddl = ", ".join(f"{name} {ddl_of(of)}" for name, of in shape.items())
    spec = spec_of(ddl, lists_unknown=True, rescued="rescued")
    result = decoded(spec, objects)
    known = [split(one, shape, "") for one in objects]
    assert not result.errors
    unknown = {i: sorted(n.removeprefix(".") for n in names) for i, (*_, names) in enumerate(known)}
    assert result.unknown == {i: names for i, names in unknown.items() if names}
    kept = result.rows["rescued"].to_pylist()
    found = [None if one is None else json.loads(one) for one in kept]
    assert found == [left for _, left, _ in known]
    alone = decoded(spec_of(ddl), [one for one, *_ in known])
    assert alone.rows.equals(result.rows.drop_columns("rescued"))
