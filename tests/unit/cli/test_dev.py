"""`anabranch dev`, as far as it goes without a JVM."""

import json
from pathlib import Path

import pytest
from conf_folders import said

from anabranch.common.errors import ConfigurationError
from anabranch.dev import services
from anabranch.dev.services.processes import free_port
from anabranch.spark.jars import Jars


def test_the_services_of_a_home_that_never_ran_are_stopped(tmp_path: Path) -> None:
    home = tmp_path / "home"
    states = services.status(services.Home(home))
    stopped = [("kafka", "stopped", None), ("s3", "stopped", None)]
    assert [(s.service, s.state, s.pid) for s in states] == stopped
    # Down is fine when nothing runs.
    answer = said("dev", "down", "--home", str(home), "--output", "json")
    assert json.loads(answer) == {"stopped": [], "wiped": False}
    assert not home.exists()


def test_down_removes_our_data_alone_and_only_with_wipe(tmp_path: Path) -> None:
    for name in ("data/s3/bucket", "logs", "run", "kept"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("data/s3/bucket/file", "catalog.db", "notes.txt"):
        (tmp_path / name).touch()
    services.down(services.Home(tmp_path), wipe=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev.lock", "kept", "notes.txt"]
    (tmp_path / "data" / "s3").mkdir(parents=True)
    (tmp_path / "catalog.db").touch()
    services.down(services.Home(tmp_path))
    assert (tmp_path / "data" / "s3").is_dir() and (tmp_path / "catalog.db").exists()


def test_wrong_ports_are_refused_before_anything_starts(tmp_path: Path) -> None:
    arguments = ("dev", "up", "--home", str(tmp_path), "--kafka-port", "65536")
    assert "65536" in said(*arguments, expect=2)
    port = free_port()
    nothing = Jars(tmp_path, (), (), ())
    with pytest.raises(ConfigurationError, match=f"cannot share port {port}"):
        services.up(services.Home(tmp_path), port, port, nothing)
    assert not (tmp_path / "run").exists()


def test_a_home_is_one_and_shows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert services.Home(Path(".anabranch")) == services.Home(tmp_path / ".anabranch")
    stack = services.Services(services.Home(tmp_path), 1, 2, "key", "s3cr3t")
    assert stack.secret_key == "s3cr3t" and "s3cr3t" not in repr(stack)


@pytest.mark.parametrize("name", ["", "a b", "..", "x" * 250])
def test_a_name_that_no_topic_may_have_is_wrong_usage(name: str) -> None:
    assert "1 to 249 of" in said("dev", "topic", name, expect=2)
