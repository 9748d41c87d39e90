"""Reports of many streams: what each answers, and who does not when a service hangs."""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import yaml
from click.testing import CliRunner, Result
from commands import call
from world import World

from anabranch.cli import main

NO_HANG = 32.0
"""Seconds in which a command ends that answers within 8 s on an idle machine."""


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a service that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _run(one: World, *arguments: str) -> tuple[Result, float]:
    began = time.monotonic()
    done = CliRunner().invoke(main, [*arguments, "--conf", str(one.folder)])
    return done, time.monotonic() - began


def test_a_service_that_hangs_is_named_in_time(world: Callable[..., World], silent: str) -> None:
    one = world(group="small")
    files = one.folder / "streams"
    good = yaml.safe_load((files / f"{one.name}.yaml").read_text())
    for i in range(20):
        table = {"table": f"{one.name}.many{i}"} if i else {"table": f"{one.name}.second"}
        (files / f"many{i}.yaml").write_text(yaml.safe_dump(good | table))
    one.topic()
    call(one, "apply", one.name, "many0")
    one.send_now(6, "a")

    done, _ = _run(one, "status", one.name, "many0", "many1", "--output", "json")
    assert done.exit_code == 1, done.output
    first, second, third = json.loads(done.stdout)
    assert [first["lag"]["offsets"], second["lag"]["offsets"]] == [6, 6]
    assert third["stream"] == "many1" and "run `anabranch apply`" in third["error"]
    assert "anabranch: stream many1: " in done.stderr or "many1" in done.stderr
    done, _ = _run(one, "hours", one.name, "many0", "--output", "json")
    assert [(view["stream"], len(view["hours"])) for view in json.loads(done.stdout)] == [
        (one.name, 1),
        ("many0", 1),
    ]
    done, _ = _run(one, "maintain", one.name, "many1", "--dry-run", "--output", "json")
    assert [view["stream"] for view in json.loads(done.stdout)] == [one.name, "many1"]
    assert done.exit_code == 1
    done, _ = _run(one, "audit", one.name, "many0", "--output", "json")
    assert (done.exit_code, [view["stream"] for view in json.loads(done.stdout)]) == (
        0,
        [one.name, "many0"],
    )

    done, _ = _run(one, "complete", one.name, "many0", "--output", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "complete_through": None,
        "streams": {one.name: None, "many0": None},
        "errors": {},
    }

    one.set_environment(kafka={"bootstrap_servers": silent})
    done, seconds = _run(one, "status", one.name, "many0")
    assert (done.exit_code, seconds < NO_HANG) == (75, True), (seconds, done.output)
    for name in (one.name, "many0"):
        # 6 s, less what the selection of the streams took.
        found = (
            rf"anabranch: stream {name}: expected an answer within [\d.]+ s, found none from Kafka"
        )
        assert re.search(found, done.stderr), done.stderr
    # Hours need no Kafka.
    assert _run(one, "hours", one.name, "many0")[0].exit_code == 0

    one.set_environment(s3=one.environment_file["s3"] | {"endpoint": f"http://{silent}"})
    done, seconds = _run(one, "hours", "--group", "small", "--output", "json")
    assert (done.exit_code, seconds < NO_HANG) == (75, True), (seconds, done.output)
    said = {view["stream"]: view["error"] for view in json.loads(done.stdout)}
    assert len(said) == 21
    found = r"expected an answer within [\d.]+ s, found none from the catalog or the store"
    assert re.search(found, said[one.name]), said
