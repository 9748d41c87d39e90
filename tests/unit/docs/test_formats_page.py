"""The first table of docs/reference/formats.md: what its rows write gives what they say."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kafka_batches import new_batch

from anabranch.config.schema import parse_schema
from anabranch.config.stream import Stream
from anabranch.decode import Decoder, decode_spec

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "formats.md"


def examples() -> Iterator[Any]:
    table = PAGE.read_text(encoding="utf-8").split("\n\n")[1].splitlines()[2:]
    assert len(table) > 10
    for line in table:
        what, *cells = re.split(r"(?<!\\) \| ", line.strip("| "))
        yield pytest.param(*(cell.strip("`").replace("\\|", "|") for cell in cells), id=what)


@pytest.mark.parametrize(("record", "write", "gives"), list(examples()))
def test_a_row_gives_what_it_says(record: str, write: str, gives: str) -> None:
    written = yaml.safe_load("{" + write + "}")
    columns = parse_schema(written["schema"] if "format" in written else written)
    stream = Stream.model_validate(
        {
            "name": "s", "topic": "s", "table": "s.s", "key": [columns[0].name], "schema": "",
            "columns": columns, "format": written.get("format", {"type": "json"}),
        }
    )  # fmt: skip
    result = Decoder(decode_spec(stream)).decode(new_batch([record.encode()]))
    assert not result.errors
    [row] = result.rows.select([column.name for column in columns]).to_pylist()
    assert ", ".join(map(as_text, row.values())) == gives


def as_text(value: Any) -> str:
    if isinstance(value, datetime):
        whole, fraction = value.strftime("%Y-%m-%dT%H:%M:%S %f").split()
        digits = fraction.removesuffix("000") if value.microsecond else ""
        return f"{whole}{'.' if digits else ''}{digits}Z"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {as_text(one)}" for name, one in value.items()) + "}"
    return str(value)
