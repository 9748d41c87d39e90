"""The commands of operators' pages that start a Spark job, a server or another's tool."""

import json
import os
import sqlite3
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kafka_tools
import pytest
from commands import ROOT, started
from programs import output_of
from run_books import printed, words
from secure_broker import CLIENT, running_secure_broker
from servers import free_ports, serving
from waiting import wait_for
from world import Make, World, event, hours_of_now, past_hour, spread

from anabranch import config
from anabranch.common.errors import ConfigurationError
from anabranch.dev.services.processes import HOST, free_port
from anabranch.operations.doctor import kafka as of_kafka
from anabranch.spark import jars
from anabranch.spark.jars import cache_folder

REFUSED, OTHER = past_hour(2), past_hour(1)
hours_of_each_test = hours_of_now(globals(), REFUSED=2, OTHER=1)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Kafka's tools and of ours."""
    folder = tmp_path_factory.mktemp("tools")
    kafka_tools.write_scripts(folder)
    (folder / "anabranch").write_text(f'#!/bin/sh\nexec {sys.executable} -m anabranch.cli "$@"\n')
    (folder / "anabranch").chmod(0o755)
    return folder


def shell(command: str, tools: Path, folder: Path, **environment: str) -> str:
    """Run a command in a shell, in a folder, and return what it prints."""
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return output_of(command, shell=True, cwd=folder, env=os.environ | path | environment)


def job(one: World, command: str, expect: int = 0) -> str:
    """The log of a command that becomes a Spark job, run to its end."""
    with started(one, *words(command)) as running:
        code = running.wait()
        assert code == expect, f"{command}: {code}\n{running.log[-4000:]}"
        return running.log


def test_an_hour_is_refused_mended_accepted_and_restated(world: Make, tools: Path) -> None:
    one = world()
    limit = {"type": "expect_column_values_to_be_between", "severity": "critical"}
    one.expect(limit | {"kwargs": {"column": "level", "max_value": 50}})
    one.topic()
    one.send([(p, at, event(f"e-{at}", at, level=99)) for p, at, _ in spread(REFUSED, 20, "e")])
    one.begin([(p, at, event(f"f-{at}", at, level=70)) for p, at, _ in spread(OTHER, 20, "f")])
    with started(one, *words(printed("anabranch speed STREAM", STREAM=one.name))) as speed:
        speed.until(lambda: one.published == 40, "the speed layer to reach the head")
    name = {"STREAM": one.name}
    log = job(one, printed("anabranch batch STREAM", **name), expect=1)
    assert f"refused hour={REFUSED} reason=" in log and f"refused hour={OTHER} reason=" in log
    one.expect(limit | {"kwargs": {"column": "level", "max_value": 80}})
    job(one, printed("anabranch batch STREAM --hour HOUR", **name, HOUR=OTHER))
    values = name | {"HOUR": REFUSED, "TEXT": "'a level of 99 is real'"}
    accept = printed("anabranch batch STREAM --hour HOUR --accept --why TEXT", **values)
    job(one, accept)
    assert {REFUSED, OTHER} <= one.state.accepted.keys()
    job(one, printed("anabranch batch STREAM --hour HOUR --restate", **name, HOUR=OTHER))
    assert one.state.accepted[OTHER].revision == 2
    job(one, printed("anabranch dead-letters STREAM --replay", **name))
    assert one.contents() == one.acknowledged()


def test_the_jobs_logs_contain_the_events_of_an_hour(world: Make, tools: Path) -> None:
    one = world(partitions=2)
    one.begin(spread(OTHER, 10, "e"))
    for layer, options in (("speed", ["--available-now"]), ("batch", [])):
        with started(one, layer, one.name, *options, ANABRANCH_LOG="json") as running:
            assert running.wait() == 0, running.log
            lines = [line for line in running.log.splitlines() if line.startswith("{")]
            (one.folder / f"{layer}.log").write_text("\n".join(lines))
    ids = {"ID": "none", "HOUR": OTHER}
    asked = printed(
        """jq -c 'select(.publish == "ID" or .hour == "HOUR")' speed.log batch.log""", **ids
    )
    events = [json.loads(line) for line in shell(asked, tools, one.folder).splitlines()]
    assert events and {event["hour"] for event in events} == {OTHER}


def test_kafkas_own_tools(world: Make, tools: Path, tmp_path: Path) -> None:
    one = world()
    servers = {"BROKERS": one.job.environment.kafka.bootstrap_servers, "TOPIC": one.name}
    create = printed(
        "kafka-topics.sh --bootstrap-server BROKERS --create --topic TOPIC --partitions 3",
        **servers,
    )
    shell(create, tools, tmp_path)
    assert len(one.described.partitions) == 3
    configure = printed(
        "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC --add-config "
        "min.insync.replicas=2",
        **servers,
    )
    shell(configure, tools, tmp_path)
    settings = one.kafka.settings(one.name)
    assert settings is not None and settings.min_insync == 2
    hanging = printed(
        "kafka-transactions.sh --bootstrap-server BROKERS find-hanging --topic TOPIC", **servers
    )
    shell(hanging, tools, tmp_path)


def test_rights_are_given_by_kafka_acls(world: Make, tools: Path, tmp_path: Path) -> None:
    one = world()
    with running_secure_broker(tmp_path / "broker") as broker:
        command = printed(
            "kafka-acls.sh --bootstrap-server BROKERS --add --allow-principal User:NAME "
            "--operation Read --operation Describe --operation DescribeConfigs --topic TOPIC",
            BROKERS=broker.plain,
            TOPIC=one.name,
        )
        environment = config.Kafka(bootstrap_servers=broker.plain)
        remedy = of_kafka.failed(environment, one.job.stream, ConfigurationError("denied")).remedy
        assert remedy.startswith(f"{command}, or ")
        said = shell(command.replace("NAME", CLIENT), tools, tmp_path)
        group = printed(
            "kafka-acls.sh --bootstrap-server BROKERS --add --allow-principal User:NAME "
            "--operation Read --group anabranch-STREAM",
            BROKERS=broker.plain,
            STREAM=one.name,
        )
        listed = shell(group.replace("NAME", CLIENT), tools, tmp_path)
        assert "operation=READ, permissionType=ALLOW)" in listed
    assert said.count("permissionType=ALLOW") >= 3


def test_the_process_that_locks_the_catalog_is_named(tools: Path, tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"
    holder = sqlite3.connect(file)
    try:
        holder.execute("CREATE TABLE t (n)")
        pids = shell(printed("fuser FILE", FILE=str(file)), tools, tmp_path).split()
    finally:
        holder.close()
    assert str(os.getpid()) in pids


def test_the_clock_of_the_machine_is_corrected(world: Make, tools: Path, tmp_path: Path) -> None:
    one = world()

    def checks(before: str, **environment: str) -> set[str]:
        command = f"{before}anabranch doctor {one.name} --output json || true"
        text = shell(command, tools, ROOT, ANABRANCH_CONF=str(one.folder), **environment)
        report = json.loads(text)
        return {finding["check"] for finding in report["findings"]}

    other = {"PYSPARK_PYTHON": "/bin/false"}
    assert "local.python" in checks("", **other)
    assert "local.python" not in checks(f"{printed('unset PYSPARK_PYTHON')}; ", **other)
    # The jars are resolved again from Ivy's own cache.
    (tmp_path / "ivy").symlink_to(cache_folder() / "ivy")
    cache = {"ANABRANCH_CACHE": str(tmp_path)}
    folder = tmp_path / "jars" / jars.cached()[0].name
    (folder / jars.JOBS[0]).mkdir(parents=True)
    (folder / jars.JOBS[0] / "altered.jar").write_text("x")
    assert "local.jars-differ" in checks("", **cache)
    shell(printed("rm -r FOLDER && anabranch jars", FOLDER=str(folder)), tools, ROOT, **cache)
    assert not {"local.jars", "local.jars-differ"} & checks("", **cache)
    named = shell(printed("du -xhd1 FOLDER", FOLDER=str(tmp_path)), tools, tmp_path)
    assert f"{tmp_path}/jars" in named


def test_services_of_this_machine_are_started(tools: Path, tmp_path: Path) -> None:
    kafka, s3 = free_ports(2)
    try:
        ports = f"--kafka-port {kafka} --s3-port {s3}"
        said = shell(f"{printed('anabranch dev up')} {ports}", tools, tmp_path)
        assert said.count("running") >= 2
    finally:
        shell("anabranch dev down --wipe", tools, tmp_path)


@contextmanager
def served(command: str, address: str, one: World) -> Iterator[Callable[[], str]]:
    """A command that serves, and what its address says."""

    def text() -> str:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return str(answer.read().decode())

    command_line = [sys.executable, "-m", "anabranch.cli", *words(command)]
    environment = {"ANABRANCH_CONF": str(one.folder), "PYTHONPATH": str(ROOT)}
    with serving(command_line, one.folder / "served.log", lambda: bool(text()), 60, environment):
        yield text


def test_the_page_is_started(world: Make) -> None:
    one = world(create=2)
    port = str(free_port())
    page = f"{printed('anabranch page')} --port {port}"
    with served(page, f"http://{HOST}:{port}/metrics", one) as text:
        wait_for(
            lambda: f'anabranch_up{{stream="{one.name}"}} 1.0' in text(), "its metric", 60, 0.5
        )
    with served(page, f"http://{HOST}:{port}/", one) as text:
        wait_for(lambda: "in order" in text(), "the page to have read the stream", 60, 0.5)
