"""Values and verdicts of a frozen corpus: what Spark's decoder, which this one replaced, gave. Each
kind of difference is named, with its reason."""

import base64
import gzip
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import hostile
import pytest
from cases import decoded, spec_of

CORPUS = Path(__file__).parent / "corpus.jsonl.gz"
BOUNDS = {"json": hostile.EVENT_TIME, "csv": {**hostile.EVENT_TIME, "column": "event_time"}}

LAST_ONE_COUNTS = "of a repeated field the last value counts, at every level"
IN_ORDER = "the first column decides, not the one that the parser met first"
WHOLE_FIRST = "a value is judged as a whole before its columns"
OF_REPEATED = (None, "missing_required", "unknown_field", "unreadable_timestamp", "wrong_type")
OF_WHOLE = ("malformed_json", "not_an_object", "too_deep", "lone_surrogate")
CHANGES = {
    **dict.fromkeys((("duplicate_key", now) for now in OF_REPEATED), LAST_ONE_COUNTS),
    **dict.fromkeys((("wrong_type", now) for now in OF_WHOLE), WHOLE_FIRST),
    ("wrong_type", None): LAST_ONE_COUNTS, ("wrong_type", "unreadable_timestamp"): IN_ORDER,
    ("malformed_json", "too_deep"): "of two reasons the other is named",
    ("malformed_json", "lone_surrogate"): "of two reasons the other is named",
    ("unreadable_timestamp", "wrong_type"): "1e999 is a number, not the text Infinity",
}  # fmt: skip


def groups() -> Iterator[Any]:
    with gzip.open(CORPUS, "rt") as lines:
        by_stream: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for line in lines:
            one = json.loads(line)
            key = (one["format"], one["ddl"], one["delimiter"], one["unknown"])
            by_stream.setdefault(key, []).append(one)
    for i, (key, records) in enumerate(by_stream.items()):
        yield pytest.param(*key, records, id=f"{key[0]}-{key[3]}-{i}")


def as_json(value: Any) -> Any:
    """A value as the corpus has it."""
    match value:
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        case date():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal() | float():
            return pytest.approx(float(value), rel=1e-7)
        case [(_, _), *_]:
            return {key: as_json(one) for key, one in value}
        case list():
            return [as_json(one) for one in value]
        case dict():
            return {key: as_json(one) for key, one in value.items()}
    return value


@pytest.mark.parametrize(("form", "ddl", "delimiter", "unknown", "corpus"), list(groups()))
def test_the_corpus_is_read_as_before(
    form: str, ddl: str, delimiter: str, unknown: str, corpus: list[dict[str, Any]]
) -> None:
    is_bounded = form == "csv" or "at TIMESTAMP NOT NULL" in ddl
    spec = spec_of(
        ddl, form, BOUNDS[form] if is_bounded else None, delimiter=delimiter or ",",
        rescued="rescued" if unknown == "rescue" else None, refuses_unknown=unknown == "refuse",
        lists_unknown=True,
    )  # fmt: skip
    values = [None if one["value"] is None else base64.b64decode(one["value"]) for one in corpus]
    result = decoded(spec, values)
    rows, changes = result.rows.to_pylist(), Counter[Any]()
    texts = {column.name for column in spec.columns if column.type == "string"}
    for i, one in enumerate(corpus):
        code, _ = result.errors.get(i, (None, ""))
        if code != one["code"]:
            is_marked = str(one["code"]).startswith("malformed") and values[i].startswith(BOM_UTF8)
            # A byte order mark is ignored: the rest is judged.
            assert is_marked or (one["code"], code) in CHANGES, values[i]
            changes[one["code"], code] += 1
        elif code is None:
            for name, expected in one["row"].items():
                found = rows[i][name]
                if name in texts and found != expected:
                    # A STRING has other values than texts as they were sent.
                    assert f'"{name}"'.encode() in values[i] or b"\\u" in values[i]
                    assert found.encode() in values[i] and not expected.startswith('"x')
                    changes["as sent"] += 1
                elif expected == {}:
                    assert found in ([], {})
                else:
                    assert expected == as_json(found), (name, values[i])
            # It has no names of fields inside columns.
            names = [name for name in result.unknown.get(i, ()) if "[]" not in name]
            assert sorted(names) == one["names"]
    assert changes.total() <= len(corpus) / 2, changes
