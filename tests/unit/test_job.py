"""A running process's streams by a folder's files: a mistake in one stops none."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from conf_folders import write_environment, write_stream

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.config import UNREADABLE, load_families, loaded, select_streams
from anabranch.job import Job, StreamFolder


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path)
    (tmp_path / "defaults.yaml").write_text("group: small")
    write_stream(tmp_path, "a", group="small")
    write_stream(tmp_path, "b")
    write_stream(tmp_path, "c", group="large")
    return tmp_path


def kinds(found: Mapping[str, Job | AnabranchError]) -> dict[str, str]:
    return {name: "job" if isinstance(one, Job) else "error" for name, one in found.items()}


def test_what_a_file_lacks_may_come_later(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The hazard: the file itself does not change, and its stream waits for a restart."""
    write_stream(conf, "b", expectations="suite.yaml")
    folder = StreamFolder(str(conf))
    found = folder.jobs()["b"]
    assert "expected the file" in str(found)
    assert folder.jobs()["b"] is found and caplog.text.count("stream b: file ignored") == 1
    (conf / "streams" / "suite.yaml").write_text("expectations: []")
    assert kinds(folder.jobs())["b"] == "job"


def test_streams_share_one_client_of_the_catalog_whatever_their_files_become(conf: Path) -> None:
    """The hazard: a hundred streams held more connections than PostgreSQL accepts by default."""
    folder = StreamFolder(str(conf))
    before = [*folder.jobs().values()]
    write_stream(conf, "a", group="small", format="json")
    write_stream(conf, "d")
    after = [*folder.jobs().values()]
    jobs = [job for job in (*before, *after) if isinstance(job, Job)]
    assert len(jobs) >= 6
    for shared in ({id(job.lake.catalog) for job in jobs}, {id(job.lake.clock) for job in jobs}):
        assert len(shared) == 1


def test_a_named_stream_without_its_file_is_gone_a_wrong_one_is_not(conf: Path) -> None:
    folder = StreamFolder(str(conf), ["a", "b"])
    assert kinds(folder.jobs()) == {"a": "job", "b": "job"}
    file = conf / "streams" / "a.yaml"
    right = file.read_text()
    file.write_text("group: [")
    assert kinds(folder.jobs()) == {"a": "error", "b": "job"}
    file.unlink()
    assert kinds(folder.jobs()) == {"b": "job"}
    file.write_text(right)
    assert kinds(folder.jobs()) == {"a": "job", "b": "job"}
    # One that never was is a mistake in the command.
    assert kinds(StreamFolder(str(conf), ["a", "none"]).jobs()) == {"a": "job", "none": "error"}


def test_the_group_of_a_wrong_file_is_the_one_that_it_names_or_had(conf: Path) -> None:
    folder = StreamFolder(str(conf))
    folder.jobs()
    assert folder.groups == {"a": "small", "b": "small", "c": "large"}
    write_stream(conf, "a", key="missing")
    (conf / "streams" / "c.yaml").write_text("group: [")
    (conf / "streams" / "new.yaml").write_text("group: [")
    assert kinds(folder.jobs()) == {"a": "error", "b": "job", "c": "error", "new": "error"}
    assert folder.groups == {"a": "small", "b": "small", "c": "large", "new": UNREADABLE}


def test_a_file_that_is_no_yaml_for_a_moment_takes_no_stream_from_its_group(conf: Path) -> None:
    folder = StreamFolder(str(conf), group="small")
    (conf / "defaults.yaml").write_text("group: [")
    assert kinds(folder.jobs()) == {"a": "error", "b": "error"}
    # A process that starts then knows no group of `b`.
    assert kinds(StreamFolder(str(conf), group="small").jobs()) == {"a": "error", "b": "error"}
    (conf / "defaults.yaml").write_text("group: small")
    assert kinds(folder.jobs()) == {"a": "job", "b": "job"}
    folder = StreamFolder(str(conf), group="small")
    assert kinds(folder.jobs()) == {"a": "job", "b": "job"}
    for name in ("a", "c"):
        (conf / "streams" / f"{name}.yaml").write_text("group: [")
    assert kinds(folder.jobs()) == {"a": "error", "b": "job"}
    write_stream(conf, "a", group="large")
    assert kinds(folder.jobs()) == {"b": "job"}


def test_of_two_files_with_one_table_the_second_is_an_error_and_the_others_run(conf: Path) -> None:
    write_stream(conf, "d", group="large", table="games.C_hours")
    folder = StreamFolder(str(conf))
    assert kinds(folder.jobs()) == {"a": "job", "b": "job", "c": "job", "d": "error"}
    found = folder.jobs()
    assert "found games.C_hours, which" in str(found["d"])
    assert f"{conf}/streams/c.yaml names too" in str(found["d"])
    assert folder.jobs()["c"] is found["c"]
    # One that is added later takes no table from a stream that runs.
    write_stream(conf, "a_first", table="games.b")
    assert kinds(folder.jobs()) == {
        "a": "job", "a_first": "error", "b": "job", "c": "job", "d": "error",
    }  # fmt: skip
    (conf / "streams" / "c.yaml").unlink()
    assert kinds(folder.jobs()) == {"a": "job", "a_first": "error", "b": "job", "d": "job"}
    found = StreamFolder(str(conf)).jobs()
    assert kinds(found) == {"a": "job", "a_first": "job", "b": "error", "d": "job"}
    assert "expected a table of its own, found games.b" in str(found["b"])


@pytest.mark.parametrize(
    "wrong",
    [
        "topic: {", "- 1", f"x: {'[' * 100_000}{']' * 100_000}",
        "select: [id, {topic: {kafka: {name: topic}}}]", "select: [id, {m: {1: id}}]",
        f"schema: id {'ARRAY<' * 3000}INT{'>' * 3000}",
        f"select: [id, {{x: {{sql: '{'(' * 3000}id{')' * 3000}', type: INT}}}}]",
        "\n".join(["l0: &l0 [x]", *(f"l{i}: &l{i} [{f'*l{i - 1}, ' * 10}]" for i in range(1, 30))]),
        "x: &a [*a]",
    ],
    ids=lambda wrong: wrong[:20],
)  # fmt: skip
def test_a_wrong_file_ends_no_job(conf: Path, caplog: pytest.LogCaptureFixture, wrong: str) -> None:
    good = (conf / "streams" / "b.yaml").read_text()
    keys = {wrong.partition(":")[0]}
    lines = [f"{k}: {json.dumps(v)}" for k, v in yaml.safe_load(good).items() if k not in keys]
    (conf / "streams" / "b.yaml").write_text("\n".join([wrong, *lines]))
    assert kinds(StreamFolder(str(conf)).jobs()) == {"a": "job", "b": "error", "c": "job"}
    assert "stream b: file ignored: " in caplog.text
    (conf / "streams" / "b.yaml").write_text(f"{wrong}\ntopics: {{pattern: 'b-.*'}}")
    assert isinstance(load_families(conf)["b"], ConfigurationError)
    assert [stream.name for stream in loaded(select_streams(conf, every=True))] == ["a", "c"]
