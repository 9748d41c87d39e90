"""Reports of many streams, with real tables: answers, and no answer when a service hangs."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import Broker
from click.testing import CliRunner, Result
from conf_folders import write_environment, write_stream
from lakes import DDL, new_lake

from anabranch.cli import main, many
from anabranch.offsets.hours import Cut, Timeline
from anabranch.protocol.state import Accepted

HOURS = ("2026-11-21T00", "2026-11-21T01", "2026-11-21T02")
CUTS = {hour: Cut("t", {0: (i, i + 1)}) for i, hour in enumerate(HOURS)}
NAMES = [f"s{i}" for i in range(4)]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a service that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def conf(tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four streams with tables, each with one accepted hour more than the last; Kafka hangs."""
    monkeypatch.setattr("anabranch.cli.many.ANSWER_SECONDS", 3.0)
    write_environment(tmp_path, kafka={"bootstrap_servers": silent})
    for i, name in enumerate(NAMES):
        timeline = Timeline(HOURS[0], "2026-11-21T03", {0: 3}, sealed=CUTS)
        lake = new_lake(tmp_path, timeline=timeline, name=name)
        for hour in HOURS[:i]:
            lake.publish(lake.accept(lake.stage([(hour, 0, 0)]), hour, Accepted(1, CUTS[hour])))
        write_stream(tmp_path, name, schema=DDL)
    return tmp_path


def hanging(silent: str) -> dict[str, str]:
    """The section of a catalog that hangs."""
    uri, warehouse = f"http://{silent}", "file:///nowhere"
    return {"name": "lake", "type": "rest", "uri": uri, "warehouse": warehouse}


def _run(conf: Path, *arguments: str) -> tuple[Result, float]:
    began = time.monotonic()
    return CliRunner().invoke(main, [*arguments, "--conf", str(conf)]), time.monotonic() - began


def _assert_each_names(done: Result, seconds: float, service: str) -> None:
    assert (done.exit_code, seconds < 8) == (75, True), (seconds, done.output)
    views = json.loads(done.stdout)
    assert [view["stream"] for view in views] == NAMES
    for view in views:
        assert f"stream {view['stream']}: expected an answer within" in view["error"]
        assert f"found none from {service};" in view["error"]
        assert view["error"] in done.stderr


def test_a_kafka_that_hangs_is_named_for_each_stream_that_needs_it(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_each_names(*_run(conf, "status", "--output", "json"), "Kafka")
    # Hours need no Kafka.
    done, _ = _run(conf, "hours", "--output", "json")
    assert done.exit_code == 0, done.output
    states = [view["hours"][0]["state"] for view in json.loads(done.stdout)]
    assert states == ["sealed", *["accepted"] * 3]
    done, _ = _run(conf, "hours", "s0", "s1")
    assert done.exit_code == 0 and "s0:" in done.stdout and "s1:" in done.stdout
    _assert_each_names(*_run(conf, "audit", "--output", "json"), "Kafka")
    monkeypatch.setattr("anabranch.cli.many.ANSWER_SECONDS", 60.0)
    maintenance = ["maintain", "--all"]
    for command in ([*maintenance, "--dry-run"], maintenance, ["audit", "--no-kafka"]):
        done, _ = _run(conf, *command, "--output", "json")
        assert [view["stream"] for view in json.loads(done.stdout)] == NAMES, done.output
        assert not [view for view in json.loads(done.stdout) if "error" in view], done.output
    done, _ = _run(conf, "maintain", "--all")
    first = [line.partition(":")[0] for line in done.stdout.splitlines() if "speed rows" in line]
    assert (done.exit_code, first) == (0, NAMES)


def test_many_streams_get_the_time_they_need(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: on a small machine all streams together take too long, and nothing is printed."""
    open_job = many._job

    def slow(*given: Any) -> Any:
        time.sleep(1.6)
        return open_job(*given)

    monkeypatch.setattr(many, "_job", slow)
    monkeypatch.setattr(many, "_AT_ONCE", 1)
    monkeypatch.setattr(many, "ANSWER_SECONDS", 5.0)
    done, seconds = _run(conf, "hours", "--output", "json")
    assert (done.exit_code, seconds > 5) == (0, True), done.output


def test_fifty_streams_are_answered_in_time_though_a_service_hangs(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.cli.many.ANSWER_SECONDS", 3.0)
    write_environment(tmp_path, kafka={"bootstrap_servers": silent}, catalog=hanging(silent))
    names = [f"t{i:02}" for i in range(50)]
    for name in names:
        write_stream(tmp_path, name, schema=DDL)
    for command in (["maintain", "--all"], ["audit"]):
        done, seconds = _run(tmp_path, *command, "--output", "json")
        assert (done.exit_code, [view["stream"] for view in json.loads(done.stdout)]) == (75, names)
        errors = [view["error"] for view in json.loads(done.stdout)]
        named = (
            "found none from the catalog or the store;",
            "because the streams before it did not answer",
        )
        assert [error for error in errors if not any(words in error for words in named)] == []
        assert sum(named[0] in error for error in errors) == 16
        assert seconds < 100, "one after the other they would take minutes"


def test_a_catalog_that_hangs_is_named_for_each_stream_in_time(
    conf: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load((conf / "anabranch.yaml").read_text())
    settings |= {"catalog": hanging(silent)}
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(settings))
    complete = ["complete", "--event-time", "2026-11-21"]
    others = (["status"], ["hours"], ["history"], ["maintain", "--all"], ["audit"])
    for command in (complete, *others):
        _assert_each_names(*_run(conf, *command, "--output", "json"), "the catalog or the store")
    # Kafka and the catalog are waited for at once, and only for what needs them; clients wait 30 s.
    monkeypatch.setattr("anabranch.operations.doctor._SERVICE_SECONDS", 1.0)
    for streams, names in (([], NAMES), (["s0"], ["s0"])):
        done, seconds = _run(conf, "doctor", *streams, "--output", "json")
        assert (done.exit_code, seconds < 25) == (1, True), (seconds, done.output)
        found = json.loads(done.stdout)["findings"]
        unanswered = [f["subject"] for f in found if f["check"] == "no-answer"]
        of_each = [f"{what} {name}" for name in names for what in ("kafka", "tables")]
        assert unanswered == ["catalog", *of_each]


def test_a_group_is_complete_with_its_last_and_selected_in_one_way(conf: Path) -> None:
    done, _ = _run(conf, "complete", "s1", "s2", "s3", "--output", "json")
    streams = {"s1": HOURS[0], "s2": HOURS[1], "s3": HOURS[2]}
    expected = {"complete_through": HOURS[0], "streams": streams, "errors": {}}
    assert (done.exit_code, json.loads(done.stdout)) == (0, expected)
    done, _ = _run(conf, "complete")
    assert done.exit_code == 1 and "complete through: none" in done.stdout
    # A file that is wrong: the hour is not known, and the file is named.
    write_stream(conf, "s9", schema=DDL, key="nothing")
    done, _ = _run(conf, "complete", "s2", "s3", "s9")
    assert done.exit_code == 2 and "complete through: not known" in done.stdout
    assert "s9.yaml: key" in done.stderr
    for arguments in (["maintain"], ["batch", "s0", "--all"], ["speed", "--all", "--group", "x"]):
        done, _ = _run(conf, *arguments)
        assert done.exit_code == 2 and "expected STREAM, or --group NAME, or --all" in done.output
    done, _ = _run(conf, "hours", "s0", "--group", "x")
    assert done.exit_code == 2 and "expected STREAM, or --group NAME; give one" in done.output


@pytest.mark.parametrize(("id", "code"), [("t", 0), ("another", 1)])
def test_streams_are_not_in_order_if_jobs_refuse_a_topic_of_theirs(
    conf: Path, monkeypatch: pytest.MonkeyPatch, id: str, code: int
) -> None:
    broker = Broker(id, {0: [0] * 9})
    monkeypatch.setattr("anabranch.kafka.client.KafkaAdapter", lambda kafka: broker)
    done, _ = _run(conf, "status", "--output", "json")
    assert done.exit_code == code, done.output
    views = json.loads(done.stdout)
    assert [view["stream"] for view in views if view["unreadable"]] == NAMES[: 4 * code]
