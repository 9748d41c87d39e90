"""Java's archive of classes: the command makes it, the jobs use it, and ignore one that does not
fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import started
from world import World, past_hour, spread

from anabranch.common.errors import Terminal
from anabranch.spark.archive import archive_options, make_archive
from anabranch.spark.jars import cache_folder, ensure_jars

SHARED = "source: shared objects file"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the jars of the other one."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "jars").symlink_to(cache_folder() / "jars")
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def classes_of_a_job(one: World, log: Path) -> list[str]:
    """Return Java's log of where a speed job's classes come from; the job's own output is JSON, and
    no more."""
    conf = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"-Xlog:class+load:file={log}",
    }
    one.set_environment(spark={"master": "local[2]", "conf": conf})
    with started(one, "speed", one.name, "--available-now", "--output", "json") as command:
        assert command.wait() == 0, command.log
        said = [
            line
            for line in command.log.splitlines()
            if not line.startswith("WARNING: Using incubator")
        ]
        assert all(json.loads(line) for line in said if line), command.log
    return log.read_text(encoding="utf-8").splitlines()


@pytest.mark.full
def test_jobs_take_their_classes_from_the_archive_and_do_without_one_that_does_not_fit(
    own_cache: Path, world: Callable[..., World], tmp_path: Path
) -> None:
    jars = ensure_jars()
    assert archive_options(jars) == ([], {})
    reported: list[str] = []
    file = make_archive(jars, reported.append)
    assert file.is_relative_to(own_cache) and file.stat().st_size > 50_000_000
    assert make_archive(jars, reported.append) == file
    assert sum("making" in line for line in reported) == 1

    one = world()
    one.topic()
    one.send(spread(past_hour(1), 30, "e"))
    one.apply()
    loaded = classes_of_a_job(one, tmp_path / "with.log")
    of_archive = [line for line in loaded if SHARED in line]
    # All but what Spark compiles for its queries, and what Java makes on the way.
    assert len(of_archive) > 0.7 * len(loaded) > 5_000, (len(of_archive), len(loaded))
    for name in (
        "org.apache.iceberg.spark.SparkCatalog ",
        "org.apache.kafka.clients.consumer.KafkaConsumer ",
    ):
        assert any(name in line for line in of_archive), name

    # An archive of another Java, for example, is passed over without a word.
    file.chmod(0o644)
    with file.open("r+b") as archive:
        archive.write(b"\0" * 4096)
    assert archive_options(jars) != ([], {})
    one.send(spread(past_hour(0), 3, "f"))
    assert not [
        line
        for line in classes_of_a_job(one, tmp_path / "without.log")
        if SHARED in line and "iceberg" in line
    ]
    assert len(one.rows()) == 33


def test_a_spark_configured_by_files_has_no_archive(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with pytest.raises(
        Terminal,
        match=r"expected Spark without configuration files .* found some: jobs start without",
    ):
        make_archive(ensure_jars(), print)
    assert archive_options(ensure_jars()) == ([], {})
    assert not (own_cache / "archives").exists()
