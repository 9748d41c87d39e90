"""Both jobs on a real YARN, by deploy/yarn/spark.yaml, their executors' Python from the archive of
`anabranch pack`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from commands import ROOT, started
from running import publishes
from world import BATCH, World, past_hour, spread
from writers import BY_PYARROW, writers
from yarn_cluster import running_yarn

from anabranch.cli import main
from anabranch.spark.home import spark_home
from speed_layer.pack import python_version

PATIENT = 400.0  # seconds to wait for a job on a cluster


def settings(environment: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The shipped section for YARN with the archive's settings; Spark's jars and staging folder on
    this machine."""
    packed = CliRunner().invoke(main, ["pack", "--to", str(folder / "packed"), "--output", "json"])
    section = yaml.safe_load((ROOT / "deploy" / "yarn" / "spark.yaml").read_text("utf-8"))["spark"]
    conf = section["conf"] | environment["spark"]["conf"] | json.loads(packed.stdout)["conf"]
    del conf["spark.yarn.archive"]
    conf |= {
        "spark.yarn.jars": f"local:{spark_home()}/jars/*",
        "spark.yarn.stagingDir": f"file://{folder}/staging",
        # Without our packages: those of the archive are used.
        "spark.executorEnv.ANABRANCH_PYTHON": str(
            Path(sys.base_prefix) / "bin" / f"python{python_version()}"
        ),
    }
    return environment | {"spark": section | {"conf": conf}}


@pytest.mark.timeout(1200)
def test_both_jobs_run_on_yarn_with_the_packed_python(
    environment: dict[str, Any], tmp_path: Path
) -> None:
    hour = past_hour(1)
    speed_conf = {"trigger": "1 second", "roll_up": False}
    own = settings(environment, tmp_path)
    one = World(
        tmp_path / "conf", own, None, speed=speed_conf, batch=BATCH | {"decoder": "workers"}
    )  # type: ignore[arg-type]
    one.topic()
    one.apply()
    one.send(spread(hour, 2_000, "past"))
    (yarn := tmp_path / "yarn").mkdir()
    with (
        running_yarn(yarn) as conf,
        started(one, "speed", one.name, HADOOP_CONF_DIR=str(conf)) as speed,
    ):
        speed.until(lambda: one.published == 2_000, "the past hour to be published", PATIENT)
        assert set(writers(one)) == {BY_PYARROW}
        with started(one, "batch", one.name, "--hour", hour, HADOOP_CONF_DIR=str(conf)) as batch:
            assert batch.wait(PATIENT) == 0, batch.log[-4000:]
        one.send_now(1_000, "now")
        speed.until(lambda: one.published == 3_000, "the running hour to be published", PATIENT)
        assert speed.terminate() == 0, speed.log[-4000:]
    assert "executors: Python workers read certain records" in speed.log
    assert one.state.served_by(hour) == "batch"
    assert len(publishes(one, "batch")) == 1
    assert one.contents() == one.acknowledged()
    one.kafka.close()
