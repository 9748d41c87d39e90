"""Descriptor files: those as which a stream's columns can be read, or the reason."""

import base64
from pathlib import Path
from typing import Any

import pytest
from cases import decoded
from lakes import new_stream
from protos import HEAD, descriptors, type_of

from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream
from anabranch.decode import decode_spec
from anabranch.subjects.schemas import Schemas, read_descriptors

TEXT = HEAD + "message Order { string id = 1; int64 n = 2; }"


def stream(file: Path, ddl: str = "id STRING NOT NULL, n BIGINT", **more: Any) -> Stream:
    form = {"type": "protobuf", "descriptor": file, "message": "shop.Order"} | more
    return new_stream(format=form, schema=ddl, key="id")


def test_plain_messages_are_read_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "shop.desc"
    file.write_bytes(base64.b64decode(descriptors(TEXT)))
    of = stream(file)
    value = type_of(TEXT, "shop.Order")(id="a", n=7).SerializeToString()
    result = decoded(decode_spec(of, Schemas(of, None).known), [value])
    assert not result.errors
    assert result.rows.select(["id", "n"]).to_pylist() == [{"id": "a", "n": 7}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ddl": "id INT"}, "id: expected a type readable as int, found string"),
        ({"message": "shop.Nothing"}, "expected a message shop.Nothing, found none"),
        ({"file": "none.desc"}, "No such file"),
        ({"file": "other.desc"}, "expected a set of file descriptors, found none"),
    ],
)
def test_an_unusable_file_ends_the_job(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (tmp_path / "shop.desc").write_bytes(base64.b64decode(descriptors(TEXT)))
    (tmp_path / "other.desc").write_bytes(b"{}")
    of = stream(tmp_path / given.pop("file", "shop.desc"), **given)
    for use in (lambda: read_descriptors(of), lambda: Schemas(of, None)):
        with pytest.raises(ConfigurationError, match=rf"format\.descriptor .*{message}"):
            use()
