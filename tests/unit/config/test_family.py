"""A family: one file, a stream for each topic that matches; an unfit one is named, and no more."""

from pathlib import Path
from typing import Any

import pytest
from conf_folders import write_environment, write_stream

from anabranch import config
from anabranch.common.errors import ConfigurationError

FAMILY: dict[str, Any] = {
    "topics": {"pattern": "app-(.*)"}, "table": "raw.{1}", "key": "id",
    "schema": "id STRING NOT NULL", "group": "small",
}  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path)
    write(tmp_path, "app")
    return tmp_path


def write(conf: Path, file: str, /, **values: Any) -> None:
    write_stream(conf, file, **{"topic": None} | FAMILY | values)


def family(conf: Path, name: str = "app") -> config.Family:
    return config.load_family(name, conf)


def summary(members: dict[str, config.FamilyMember]) -> dict[str, tuple[str, str] | str]:
    def of(m: config.FamilyMember) -> tuple[str, str] | str:
        found = m.found
        return (m.topic, found.table) if isinstance(found, config.Stream) else f"{m.topic}: {found}"

    return {name: of(member) for name, member in members.items()}


def test_each_topic_that_matches_whole_is_a_stream(conf: Path) -> None:
    members = config.expand(
        [family(conf)], ["app-orders", "app-user.events", "my-app-x", "other", "app-"]
    )
    assert summary(members)["app_orders"] == ("app-orders", "raw.orders")
    assert summary(members)["app_user_events"] == ("app-user.events", "raw.user_events")
    assert sorted(members) == ["app_", "app_orders", "app_user_events"]
    assert "topic app-: table: expected namespace.table" in summary(members)["app_"]
    stream = members["app_orders"].found
    assert isinstance(stream, config.Stream)
    assert (stream.name, stream.group, stream.key) == ("app_orders", "small", ("id",))


def test_a_family_has_a_bound_of_streams(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a pattern that matches every topic of a large cluster creates tables for each."""
    monkeypatch.setattr("anabranch.config.family.MOST_STREAMS", 3)
    topics = [f"app-t{i}" for i in range(8)]
    members = config.expand([family(conf)], topics, known={"app_t7": "app-t7"})
    streams = {name for name, member in members.items() if isinstance(member.found, config.Stream)}
    assert streams == {"app_t7", "app_t0", "app_t1"}
    [error] = [str(m.found) for m in members.values() if isinstance(m.found, ConfigurationError)]
    assert "expected at most 3 streams of a family, found more topics; narrow" in error


def test_each_topic_of_a_family_is_delivered_to_a_place_of_its_own(conf: Path) -> None:
    folder = {"name": "lake", "root": "s3://bucket/out/{1}"}
    indexes = [{"name": "one", "index": "x-{1}"}, {"name": "found", "index": "all"}]
    write(conf, "app", egress=[folder, *indexes])
    found = config.expand([family(conf)], ["app-orders", "app-user.events"])
    streams = [one.found for one in found.values() if isinstance(one.found, config.Stream)]
    for stream, name in zip(streams, ("orders", "user_events"), strict=True):
        places = [target.place for target in stream.egress]
        assert places == [f"s3://bucket/out/{name}", f"x-{name}", "all"]


def test_topics_that_are_excluded_or_have_a_file_of_their_own_are_no_members(conf: Path) -> None:
    write(conf, "app", topics={"pattern": "(.*)", "exclude": ".*-dlq"}, name="{1}")
    topics = ["orders", "orders-dlq", "__consumer_offsets"]
    assert list(config.expand([family(conf)], topics)) == ["orders"]
    write(conf, "special", topics=None, topic="app-orders", table="raw.orders")
    own = [config.load_stream("special", conf)]
    assert list(config.expand([family(conf)], ["app-orders", "app-users"], own)) == ["app_users"]


def test_groups_are_numbered_or_named_and_members_stay_without_topics(conf: Path) -> None:
    known = {"app_orders": "app-orders", "app_users": "app-users"}
    members = config.expand([family(conf)], ["app-users"], (), known)
    found = {name: (m.topic, m.is_gone) for name, m in members.items()}
    assert found == {"app_orders": ("app-orders", True), "app_users": ("app-users", False)}
    topics = {"pattern": "(?P<team>[a-z]+)\\.(v[0-9]+)\\.(.*)"}
    write(conf, "app", topics=topics, table="raw.{team}_{3}_{2}", name="s_{3}")
    named = summary(config.expand([family(conf)], ["shop.v2.orders"]))
    assert named == {"s_orders": ("shop.v2.orders", "raw.shop_orders_v2")}


def test_a_topic_of_two_families_is_refused_for_both(conf: Path) -> None:
    write(conf, "all", topics={"pattern": "([a-z]*)-(.*)"}, table="all.{1}_{2}")
    families = [family(conf), family(conf, "all")]
    said = summary(config.expand(families, ["app-x", "web-y"]))
    assert said["all_web_y"] == ("web-y", "all.web_y")
    expected = f"{conf}/streams/app.yaml: topic app-x: expected one family for each topic"
    assert expected in said["app_x"]
    assert f"{conf}/streams/app.yaml matches it too" in said["all_app_x"]
    # A member that there was is not stopped by a family that is added.
    said = summary(config.expand(families, ["app-x"], (), {"app_x": "app-x"}))
    assert said["app_x"] == ("app-x", "raw.x")
    assert "expected one family" in said["all_app_x"]


@pytest.mark.parametrize(
    ("known", "other", "refused"),
    [({}, "app-a-b", "app-a.b"), ({"app_a_b": "app-a.b"}, "app-a.b", "app-a-b")],
)
def test_topics_with_one_name(conf: Path, known: dict[str, str], other: str, refused: str) -> None:
    write(conf, "app", name="{0}")
    members = config.expand([family(conf)], ["app-a-b", "app-a.b"], (), known)
    why = (
        f"{conf}/streams/app.yaml: topic {refused}: expected a stream name of its own, found app_a_b, which topic {other} "
        "has; change `name:`, or leave one topic out with `topics.exclude`"
    )  # fmt: skip
    named = {"app_a_b": (other, "raw.a_b"), f"app: {refused}": f"{refused}: {why}"}
    assert summary(members) == named


def test_a_pattern_that_python_matches_in_ages_is_matched_at_once(conf: Path) -> None:
    """The hazard: `re` tries each of 2**60 ways to part the name, and stops all threads."""
    write(conf, "app", topics={"pattern": "(.*)", "exclude": r"(\w+\.?)+-dlq"}, name="{1}")
    assert list(config.expand([family(conf)], ["a" * 60, "a.b-dlq"])) == ["a" * 60]
    write(conf, "app", topics={"pattern": r"((\w+\.?)+)-v1"}, name="{1}")
    assert list(config.expand([family(conf)], ["a" * 60, "a.b-v1"])) == ["a_b"]


def test_names_and_tables_of_streams_must_differ_from_those_of_others(conf: Path) -> None:
    said = summary(config.expand([family(conf)], ["app-orders", "app-orders_hours", "app-Orders"]))
    assert said["app_Orders"] == ("app-Orders", "raw.Orders")
    why = "expected tables of its own, found raw.orders, which belongs to stream app_Orders"
    assert f"topic app-orders: {why}" in said["app_orders"]
    assert "found raw.orders_hours, which belongs to stream app_Orders" in said["app_orders_hours"]
    write(conf, "app_x", topics=None, topic="other", table="raw.other")
    members = config.expand([family(conf)], ["app-x", "app-y"], [config.load_stream("app_x", conf)])
    assert sorted(members) == ["app: app-x", "app_y"]
    why = "expected a stream name of its own, found app_x, which topic other has"
    assert why in summary(members)["app: app-x"]


def test_a_family_is_no_stream_and_its_streams_have_it(conf: Path) -> None:
    assert (config.stream_names(conf), config.family_names(conf)) == ((), ("app",))
    found = r"found that .*app.yaml is a family; name one of its streams"
    with pytest.raises(ConfigurationError, match=found):
        config.load_stream("app", conf)
    write(conf, "app_own", topics=None, topic="app-own", table="raw.own")
    streams = [config.load_stream("app_own", conf), family(conf).build("app-x")]
    assert [stream.family for stream in streams] == [None, "app"]


def test_members_are_selected_as_streams_are_and_requested_for_them(conf: Path) -> None:
    write(conf, "own", topics=None, topic="own", table="raw.own", group="large")
    write(conf, "wrong", topics={"pattern": "("}, group="small")

    def members() -> dict[str, config.FamilyMember]:
        families = [f for f in config.load_families(conf).values() if isinstance(f, config.Family)]
        return config.expand(families, ["app-x", "app-2"])

    small = ["wrong", "app_2", "app_x"]
    assert list(config.select_streams(conf, group="large", members=members)) == ["own"]
    assert list(config.select_streams(conf, group="small", members=members)) == small
    assert list(config.select_streams(conf, every=True, members=members)) == ["own", *small]
    assert list(config.select_streams(conf, ["app_x", "own"], members=members)) == ["app_x", "own"]
    with pytest.raises(ConfigurationError, match="stream 'app_y'"):
        config.select_streams(conf, ["app_y"], members=members)

    def unasked() -> dict[str, config.FamilyMember]:
        raise AssertionError("asked")

    assert list(config.select_streams(conf, group="large", members=unasked)) == ["own"]
    assert list(config.select_streams(conf, ["own"], members=unasked)) == ["own"]
