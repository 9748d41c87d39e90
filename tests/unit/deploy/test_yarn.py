"""deploy/yarn: the arguments of spark-submit with it. No YARN runs here."""

from __future__ import annotations

from pathlib import Path

import yaml

from anabranch.config import load_environment
from anabranch.spark.settings import AVRO_LIMITS, exposed_keys, session_settings
from anabranch.spark.submit import submit_command

ROOT = Path(__file__).resolve().parents[3]


def test_client_mode_is_the_shipped_configuration_with_the_section_for_yarn(tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "conf" / "anabranch.yaml").read_text("utf-8"))
    section = yaml.safe_load((ROOT / "deploy" / "yarn" / "spark.yaml").read_text("utf-8"))
    assert list(section) == ["spark"]
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(shipped | section))
    environment = load_environment(tmp_path)
    assert exposed_keys(environment.spark.master, session_settings(environment)) == ()
    command, process = submit_command(environment, "batch_layer", ["--stream", "s"])
    assert command[command.index("--master") + 1] == "yarn"
    assert "kafka-clients" in command[command.index("--jars") + 1]
    settings = dict(
        command[i + 1].split("=", 1) for i, word in enumerate(command) if word == "--conf"
    )
    conf = {key: str(value).lower() for key, value in section["spark"]["conf"].items()}
    assert {key: settings[key].lower() for key in conf} == conf
    assert "SPARK_LOCAL_IP" not in process


def test_cluster_mode_gives_the_driver_the_settings_of_client_mode() -> None:
    lines = (ROOT / "deploy" / "yarn" / "cluster.conf").read_text("utf-8").splitlines()
    settings = dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))
    section = yaml.safe_load((ROOT / "deploy" / "yarn" / "spark.yaml").read_text("utf-8"))
    same = (
        "spark.yarn.archive",
        "spark.yarn.queue",
        "spark.executor.instances",
        "spark.executor.cores",
    )
    assert [settings[key] for key in same] == [str(section["spark"]["conf"][key]) for key in same]
    assert exposed_keys("yarn", settings | {"spark.sql.catalog.lake.jdbc.password": "p"}) == ()
    assert (settings["spark.master"], settings["spark.submit.deployMode"]) == ("yarn", "cluster")
    assert all(
        f"-D{key}={value}" in settings["spark.driver.extraJavaOptions"]
        for key, value in AVRO_LIMITS.items()
    )
    # Both archives are unpacked under the names that the command and the driver's Python use.
    names = {
        archive.partition("#")[2] for archive in settings["spark.yarn.dist.archives"].split(",")
    }
    assert names == {"environment", "conf"}
    assert settings["spark.yarn.appMasterEnv.PYSPARK_PYTHON"] == "./environment/bin/python"
