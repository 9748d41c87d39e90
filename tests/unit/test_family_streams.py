"""The streams of families by real tables, where Kafka does not answer."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from conf_folders import write_environment, write_stream
from lakes import DDL, new_lake
from waiting import wait_for

import anabranch
from anabranch import config, family_streams
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.job import open_jobs
from serving_layer.reader import open_reader


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family with a table of one topic, a table of another program's stream, no Kafka."""
    monkeypatch.setattr(family_streams, "KAFKA_S", 0.5)
    new_lake(tmp_path, name="app_orders")
    new_lake(tmp_path, name="other")
    write_environment(tmp_path)
    family = {"topics": {"pattern": "app_(.*)"}, "table": "games.app_{1}", "name": "{0}"}
    write_stream(tmp_path, "app", topic=None, schema=DDL, **family)
    return tmp_path


def test_members_are_those_with_tables_while_kafka_does_not_answer(conf: Path) -> None:
    families = family_streams.FamilyStreams(config.load_environment(conf), conf)
    members = families.members()
    families.close()
    found = {name: (member.topic, member.is_gone) for name, member in members.items()}
    assert found == {"app_orders": ("app_orders", False)}
    [error] = families.unanswered
    assert "list the topics of families" in str(error)
    for names, every in ((None, True), (["app_orders"], False)):
        _, jobs, broken = open_jobs(str(conf), names, None, every)
        assert [job.stream.name for job in jobs] == ["app_orders"] and not broken
    with pytest.raises(ConfigurationError, match="stream 'app_new': expected the file"):
        open_jobs(str(conf), ["app_new"], None, False)
    reader = open_reader(conf)
    assert reader.streams["games.app_orders"].name == "app_orders"
    assert "games.other" not in reader.streams
    assert anabranch.open("app_orders", conf=conf).arrow().num_rows == 0
    with pytest.raises(ConfigurationError, match="stream 'app_new': expected the file"):
        anabranch.open("app_new", conf=conf)


def test_members_stay_while_their_familys_file_is_wrong_or_empty(conf: Path) -> None:
    families = family_streams.FamilyStreams(config.load_environment(conf), conf, every=0.0)
    assert list(families.members()) == ["app_orders"]
    file = conf / "streams" / "app.yaml"
    right = file.read_text()

    def is_kept() -> bool:
        topics = {name: member.topic for name, member in families.members().items()}
        return topics == {"app_orders": "app_orders"} and list(families.broken) == ["app"]

    unknown, missing = right.replace("topics:", "topic:"), right.replace("key: id", "key: missing")
    for wrong in ("", "# later\n", unknown, missing):
        file.write_text(wrong)
        wait_for(is_kept, "the wrong file to be read")
        assert "app.yaml" in str(families.broken["app"]) and is_kept()
        file.write_text(right)
        wait_for(lambda: families.members() and not families.broken, "the whole file to be read")
    file.write_text(right.replace("app_(.*)", "other_(.*)"))
    wait_for(lambda: not families.members(), "the file that matches no topic to be read")
    assert families.broken == {}
    file.unlink()
    assert families.members() == {} and families.broken == {}
    assert families.read_members == {}
    file.write_text(right)
    wait_for(lambda: bool(families.members()), "the file that returned to be read")
    families.close()


@pytest.mark.parametrize("listing", ["family_names", "load_families"])
def test_members_stay_while_an_editor_empties_and_writes_their_familys_file(
    conf: Path, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    """The hazard: the file is empty for one look at the folder, and whole for the next."""
    families = family_streams.FamilyStreams(config.load_environment(conf), conf, every=0.0)
    assert list(families.members()) == ["app_orders"]
    file, look, looks = conf / "streams" / "app.yaml", getattr(config, listing), list[str]()
    right = file.read_text()

    def of_empty_file(folder: Path) -> Any:
        file.write_text("")
        found = look(folder)
        file.write_text(f"{right}\n# {len(looks)}\n")
        looks.append("")
        return found

    monkeypatch.setattr(config, listing, of_empty_file)
    file.write_text(f"{right}\n")

    def has_looked() -> bool:
        assert list(families.members()) == ["app_orders"]
        return len(looks) > 3

    wait_for(has_looked, "the file to be read while it is written")
    monkeypatch.undo()
    wait_for(lambda: families.members() and not families.broken, "the whole file to be read")
    families.close()


def test_a_selection_that_may_lack_streams_is_refused_or_reported(conf: Path) -> None:
    environment = config.load_environment(conf)
    with pytest.raises(Transient, match="list the topics of families"):
        family_streams.select_streams(environment, conf, every=True)
    unanswered: list[Any] = []
    found = family_streams.select_streams(environment, conf, every=True, unanswered=unanswered)
    assert (list(found), len(unanswered)) == (["app_orders"], 1)
    # One that has its table is known without Kafka; of another name Kafka may know.
    assert family_streams.load_stream(environment, "app_orders", conf).table == "games.app_orders"
    with pytest.raises(Transient):
        family_streams.load_stream(environment, "app_new", conf)


def test_an_unreadable_table_stops_no_other(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    location = new_lake(conf, name="app_broken").table().metadata_location
    Path(location.removeprefix("file://")).unlink()
    _, jobs, errors = open_jobs(str(conf), None, None, True)
    assert [job.stream.name for job in jobs] == ["app_orders"]
    assert list(errors) == ["games.app_broken"]
    said = str(errors["games.app_broken"])
    why = "table games.app_broken may belong to a stream of this family: "
    assert said.startswith(f"{conf}/streams/app.yaml: {why}")
    assert "expected the metadata file that the catalog names" in said
    assert anabranch.open("app_orders", conf=conf).arrow().num_rows == 0
    assert "table games.app_broken may belong to a stream" in caplog.text
    families = family_streams.FamilyStreams(config.load_environment(conf), conf)
    members = families.members()
    families.close()
    loads = {name: isinstance(member.found, config.Stream) for name, member in members.items()}
    assert loads == {"app_orders": True, "games.app_broken": False}


def test_a_table_beside_a_members_table_is_reported_as_no_stream(conf: Path) -> None:
    file = conf / "streams" / "app.yaml"
    views = {"totals": {"window": "1 hour", "aggregates": {"records": "count"}}}
    own = {"schema": f"{DDL}, at TIMESTAMP", "event_time": {"column": "at"}, "views": views}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | own))
    for name in ("app_orders_archive", "app_orders_totals_partials", "app_orders_others_partials"):
        Path(new_lake(conf, name=name).table().metadata_location.removeprefix("file://")).unlink()
    members = family_streams.members_with_tables(config.load_environment(conf), conf)
    assert list(members) == ["app_orders", "games.app_orders_others_partials"]
