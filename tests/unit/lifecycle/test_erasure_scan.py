"""The scan of every byte for erased values finds them anywhere, and none after a deadline."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from erasure_scan import ValueSearch, scan
from lakes import FIRST
from people import NOW, ORDER, People

from anabranch.common.errors import Terminal
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.files import local_path
from anabranch.iceberg.state_properties import pack
from anabranch.lifecycle.erasure.end import tables_of
from anabranch.lifecycle.erasure.search import Values
from anabranch.lifecycle.erasure.status import read_statuses
from anabranch.lifecycle.maintenance import maintain
from anabranch.protocol import ledger
from anabranch.protocol.publish import new_id

ANNA = Values.of("id", {"anna"})


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


def found(people: People) -> dict[str, set[str]]:
    """Return the places where the scan finds the person, by table."""
    places: dict[str, set[str]] = {}
    for hit in scan(people.job, ANNA, [b"annabel"]).hits:
        table = hit.path.split("/warehouse/games/")[1].split("/")[0]
        places.setdefault(table, set()).add(hit.where)
    return places


def test_a_scan_finds_a_value_until_the_deadline_ends_it(tmp_path: Path) -> None:
    people = People(tmp_path, archive=True)
    everywhere = {
        "events": {"column id", "bounds"},
        "events_dead_letters": {"column value"},
        "events_archive": {"column value"},
    }
    assert found(people) == everywhere
    people.erase(replace(ORDER, until=timedelta(days=2)))
    # No branch has one any more. The hazard: files and manifests of former snapshots do.
    assert all("anna" not in people.names(branch) for branch in ("speed", "batch", "main"))
    assert found(people) == everywhere
    maintain(people.job, datetime.now(UTC) + timedelta(days=3))
    done = scan(people.job, ANNA, [b"annabel"])
    assert done.hits == ()
    assert done.objects > 10
    assert done.bytes > 10_000
    # Other people are found as ever.
    assert scan(people.job, Values.of("id", {"bert"})).hits


def test_no_byte_stays_whatever_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: rows do not show whose records these are, and letters are next to the value."""
    one, other = "3f2b8c1e-9d4a-4e6b-8a51-0c7d2e9f1b34", "00000000-9d4a-4e6b-8a51-0c7d2e9f1b34"

    def records(of: str) -> list[bytes]:
        id = of.encode()
        avro, protobuf = b"\0\0\0\0\x01H" + id + b"Hx", b"\x0a$" + id + b"\x12\x01x"
        return [avro, protobuf, b'1,"""%s"",x"' % id, b'{"id": "\\u00e9%s\\/"}' % (b"-" + id)]

    every = [*records(one), *records(other)]
    monkeypatch.setattr("people.NAMES", ("bert", "bert", "bert", "carl"))
    monkeypatch.setattr("people.ARCHIVED", dict(enumerate(every)))
    monkeypatch.setattr("people.LETTERS", [(FIRST, o, value) for o, value in enumerate(every)])
    people = People(tmp_path, archive=True)
    values = Values.of("id", {one})
    assert scan(people.job, values).hits
    people.erase(replace(ORDER, values=values.texts, until=timedelta(0)))
    assert people.letters("speed") == sorted(records(other))
    later = datetime.now(UTC) + timedelta(days=3)
    maintain(people.job, later)
    assert scan(people.job, values).hits == ()
    assert read_statuses(people.job, later)[0].is_certificate
    assert people.archived == {4 + o: value for o, value in enumerate(records(other))}


OBJECTS = {"write.object-storage.enabled": "true"}
FLAT = OBJECTS | {"write.object-storage.partitioned-paths": "false"}
ELSEWHERE = {"write.data.path": "file://FOLDER/elsewhere/{table}"}


@pytest.mark.parametrize(
    "properties",
    [
        OBJECTS, FLAT, ELSEWHERE, ELSEWHERE | OBJECTS, ELSEWHERE | FLAT,
        {"write.metadata.path": "file://FOLDER/of-metadata/{table}"},
    ],
    ids=("objects", "flat objects", "data", "data, objects", "data, flat objects", "metadata"),
)  # fmt: skip
@pytest.mark.parametrize("is_unset", [False, True], ids=("", "unset"))
def test_no_file_of_a_value_is_left_wherever_properties_place_it(
    tmp_path: Path, properties: dict[str, str], is_unset: bool
) -> None:
    """The hazard: another team has set these properties, and perhaps removed them since."""
    placed = {key: value.replace("FOLDER", str(tmp_path)) for key, value in properties.items()}
    people = People(tmp_path, archive=True, properties=placed)
    # Files of an attempt that was not published.
    people._rows([(FIRST, 0)])
    if is_unset:
        for name in tables_of(people.job):
            with people.lake.lake.load(name).transaction() as tx:
                tx.remove_properties(*placed)
    people.erase(replace(ORDER, until=timedelta(0)))
    later = datetime.now(UTC) + timedelta(days=3)
    maintain(people.job, later)
    left = {p for p in tmp_path.rglob("*.parquet") if b"anna" in texts_of(p)}
    assert left == set()
    assert read_statuses(people.job, later)[0].is_certificate
    assert set(people.names("main")) == {"bert", "carl"}
    assert scan(people.job, Values.of("id", {"bert"})).hits


def texts_of(path: Path) -> bytes:
    return repr(pq.ParquetFile(path).read().to_pylist()).replace("annabel", "").encode()


def test_a_scan_looks_into_the_ledger_and_into_packed_properties(people: People) -> None:
    people.erase(replace(ORDER, until=timedelta(0)))
    maintain(people.job, datetime.now(UTC) + timedelta(days=3))
    assert found(people) == {}
    lake, text = people.lake.lake, json.dumps({"sample": ["anna"], "more": list(range(200))})
    packed = pack(text)
    assert packed.startswith("zlib:")
    commit = Commit(new_id(), {}, (), set_properties={"anabranch.of-a-test": packed})
    lake.commit(people.lake.table(), commit)
    why = "id: 1 value, such as anna"
    people.lake.ledger.record([ledger.decision(FIRST, "refused", 2, None, NOW, reason=why)])
    assert found(people) == {"events": {"text"}, "events_hours": {"column reason"}}


def test_a_scan_knows_bounds_that_were_cut(people: People) -> None:
    long = "anna-0123456789-and-more"
    look = ValueSearch(people.lake.table().schema(), Values.of("id", {long, "carl"}), is_rows=True)
    # Lower bounds are a part of the value, upper ones end with the next character.
    bounds = ((long[:16], True), (long[:15] + "b", True), ("carl", True), ("car", False))
    for bound, is_hit in (*bounds, (long[:9], False)):
        assert look._is_bound_of_value(bound) == is_hit


def test_a_file_that_cannot_be_read_is_named(people: People) -> None:
    folder = local_path(people.lake.table().location()) / "data"
    (folder / "theirs.parquet").write_bytes(b"no Parquet")
    found = r"scan .*theirs\.parquet: expected a readable file, found Arrow"
    with pytest.raises(Terminal, match=found):
        scan(people.job, ANNA)
