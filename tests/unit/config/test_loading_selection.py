"""Which streams a command works with: names, a group, or all; a wrong file is its own trouble."""

from pathlib import Path
from typing import Any

import pytest
from conf_folders import write_environment, write_stream

from anabranch.common.errors import ConfigurationError
from anabranch.config import broken, loaded, select_streams


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path)
    for name, group in (("a", "small"), ("b", None), ("c", "small"), ("d", "large")):
        write_stream(tmp_path, name, group=group)
    return tmp_path


def test_streams_are_selected_by_names_a_group_or_all(conf: Path) -> None:
    # Names keep their order and count once.
    assert list(select_streams(conf, ["c", "a", "c"])) == ["c", "a"]
    of_group = loaded(select_streams(conf, group="small"))
    assert [(stream.name, stream.group) for stream in of_group] == [("a", "small"), ("c", "small")]
    assert list(select_streams(conf, every=True)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("ways", "found"),
    [
        ({}, "--group NAME, or --all"),
        ({"names": ["a"], "group": "small"}, "--group NAME, or --all"),
        ({"names": ["a"], "every": True}, "--group NAME, or --all"),
        ({"group": "small", "every": True}, "--group NAME, or --all"),
        ({"names": ["a", "e"]}, r"stream 'e': expected the file .*known streams: a, b, c, d"),
        ({"group": "smal"}, r"group 'smal': .*known groups: large, small"),
    ],
)
def test_other_ways_are_refused(conf: Path, ways: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        select_streams(conf, **ways)


@pytest.mark.parametrize("ways", [{"names": ["a", "c"]}, {"group": "small"}, {"every": True}])
def test_a_wrong_file_concerns_its_own_stream_alone(conf: Path, ways: dict[str, Any]) -> None:
    write_stream(conf, "a", group="small", keyy="id")
    selected = select_streams(conf, **ways)
    assert "c" in [stream.name for stream in loaded(selected)]
    assert "unknown key 'keyy'" in str(broken(selected)["a"])
    assert list(broken(selected)) == ["a"]


def test_wrong_files_elsewhere_and_no_file_at_all(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    write_stream(conf, "d", group="large", topic="${NOT_THERE}")
    assert list(select_streams(conf, group="small")) == ["a", "c"]
    for file in (conf / "streams").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match="expected a stream's file, found none"):
        select_streams(conf, every=True)


@pytest.mark.parametrize("text", ["group: [", "group: large\nkept: 2026-11-31"])
def test_a_file_that_is_no_yaml_is_reported_with_every_group(conf: Path, text: str) -> None:
    (conf / "streams" / "d.yaml").write_text(text)
    assert list(broken(select_streams(conf, group="small"))) == ["d"]
    with pytest.raises(ConfigurationError, match="group 'large'"):
        select_streams(conf, group="large")


def test_the_second_of_two_files_with_one_table_is_an_error(conf: Path) -> None:
    write_stream(conf, "c", table="GAMES.a", group="small")
    (conf / "streams" / "b.yaml").write_text("table: [")
    for selected in (select_streams(conf, every=True), select_streams(conf, group="small")):
        assert [stream.name for stream in loaded(selected)][:1] == ["a"]
        message = str(broken(selected)["c"])
        found = "expected a table of its own, found GAMES.a"
        assert f"{conf}/streams/c.yaml: table: {found}" in message
        assert f"which {conf}/streams/a.yaml names too" in message
    write_stream(conf, "c", table="games.other")
    assert list(broken(select_streams(conf, every=True))) == ["b"]


_VIEW = {"window": "1 hour", "aggregates": {"n": "count"}}


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, {"table": "games.a_hours"}, "games.a_hours"),
        ({"table": "games.a_dead_letters"}, {"table": "games.a"}, "games.a_dead_letters"),
        ({"egress": [{"name": "e", "root": "file:///e"}]}, {"table": "games.A_Egress"}, "games.A_Egress"),
        ({"views": {"b_c": _VIEW}}, {"table": "games.a_b", "views": {"c": _VIEW}}, "games.a_b_c_partials"),
        ({"views": {"b": _VIEW}}, {"table": "games.a_b"}, "games.a_b"),
        ({"archive": {"raw": "1 day"}}, {"table": "games.a_archive"}, "games.a_archive"),
        ({}, {"table": "games.a_archive"}, None),
        ({}, {"table": "games.a_egress"}, None),
    ],
)  # fmt: skip
def test_the_tables_beside_a_streams_own_are_not_shared_either(
    conf: Path, first: dict[str, Any], second: dict[str, Any], found: str | None
) -> None:
    timed = {"schema": "id STRING NOT NULL, at TIMESTAMP", "event_time": {"column": "at"}}
    write_stream(conf, "a", **timed | first)
    write_stream(conf, "b", **timed | second)
    shared = broken(select_streams(conf, every=True))
    assert list(shared) == (["b"] if found is not None else [])
    assert found is None or f"found {found}," in str(shared["b"])
