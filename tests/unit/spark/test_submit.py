"""The command line that runs a job: where Spark is, what it is sent, and which Python is whose."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.common.errors import ConfigurationError
from anabranch.config import Catalog, Environment, Kafka, Spark, load_environment
from anabranch.spark import submit

CONF = Path(__file__).resolve().parents[3] / "conf"


def environment(master: str, **conf: str) -> Environment:
    return Environment(
        kafka=Kafka(bootstrap_servers="127.0.0.1:1"),
        catalog=Catalog(name="lake", uri="sqlite:///x.db", warehouse="s3://b/w"),
        spark=Spark(master=master, conf={k.replace("_", "."): v for k, v in conf.items()}),
    )


def after(command: list[str], flag: str) -> list[str]:
    """The values of a flag, in order."""
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


@pytest.mark.parametrize("master", ["local[*]", "local[2,4]"])
def test_on_this_machine_the_jars_are_used_where_they_lie(master: str) -> None:
    command, process = submit.submit_command(environment(master), "speed_layer", ["--stream", "s"])
    assert after(command, "--master") == [master]
    assert after(command, "--jars") == []
    assert "iceberg-spark-runtime" in after(command, "--driver-class-path")[0]
    assert process["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert command[-3:] == [str(CONF.parent / "speed_layer" / "job.py"), "--stream", "s"]


@pytest.mark.parametrize(
    "master", ["spark://h:7077", "yarn", "k8s://https://h:443", "local-cluster[1,1,1024]"]
)
def test_a_cluster_is_sent_the_jars_and_no_code_of_ours(master: str) -> None:
    command, process = submit.submit_command(environment(master), "batch_layer", [])
    assert after(command, "--master") == [master]
    assert "kafka-clients" in after(command, "--jars")[0]
    assert after(command, "--driver-class-path") == []
    assert process.get("SPARK_LOCAL_IP") is None


def test_configured_options_of_java_win() -> None:
    one = environment("local[2]", spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=4")
    command, _ = submit.submit_command(one, "batch_layer", [], "-XX:TieredStopAtLevel=1")
    # Java takes the last of two values.
    options = after(command, "--driver-java-options")[0].split()
    levels = [option for option in options if "TieredStopAtLevel" in option]
    assert levels == ["-XX:TieredStopAtLevel=1", "-XX:TieredStopAtLevel=4"]


def test_a_nameless_user_is_refused_before_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a stack trace of Java, and exit code 1, which means a refused hour."""
    monkeypatch.setattr(os, "getuid", lambda: 54_321_000)
    with pytest.raises(ConfigurationError, match="user id 54321000: expected a name in /etc/passw"):
        submit.submit(environment("local[2]"), [])


@pytest.mark.parametrize("is_refused_by_the_kernel", [False, True])
def test_a_temporary_folder_that_java_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused_by_the_kernel: bool
) -> None:
    folder = tmp_path / "tmp"
    if is_refused_by_the_kernel:
        folder.mkdir()

        def refuse(*_: object, **__: object) -> None:
            # As for a file of a file system that is mounted noexec.
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(mmap, "mmap", refuse)
    options = f"-Djava.io.tmpdir=/tmp -Djava.io.tmpdir={folder}"
    one = environment("local[2]", spark_driver_extraJavaOptions=options)
    found = f"temporary folder {folder}: expected to write and execute files.*java.io.tmpdir=FOL"
    with pytest.raises(ConfigurationError, match=found):
        submit.submit(one, [])


def test_the_python_of_executors_is_not_the_drivers() -> None:
    one = environment("yarn", spark_pyspark_python="./environment/bin/python")
    command, process = submit.submit_command(one, "speed_layer", [])
    conf = after(command, "--conf")
    assert "spark.pyspark.python=./environment/bin/python" in conf
    assert f"spark.pyspark.driver.python={sys.executable}" in conf
    # In this process, a driver has the executors' Python from its environment alone.
    assert process["PYSPARK_PYTHON"] == "./environment/bin/python"


def test_a_driver_elsewhere_is_refused() -> None:
    found = r"expected no spark\.submit.deployMode, or client, found cluster"
    one = environment("yarn", spark_submit_deployMode="cluster")
    with pytest.raises(ConfigurationError, match=found):
        submit.submit_command(one, "speed_layer", [])


def test_environment_or_command_names_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    def master(*given: str) -> str:
        chosen, arguments = submit.job_of(["game_events"], None, str(CONF), "text", [], *given)
        assert arguments == ["--stream", "game_events", "--conf", str(CONF), "--output", "text"]
        return chosen.spark.master

    assert master() == "local[*]"
    monkeypatch.setenv("ANABRANCH_SPARK_MASTER", "spark://h:7077")
    assert load_environment(CONF).spark.master == "spark://h:7077"
    assert (master(), master("yarn")) == ("spark://h:7077", "yarn")


def test_a_jobs_log_and_later_output_of_a_script_are_both_in_its_file(tmp_path: Path) -> None:
    """`script > log 2>&1`: one open file for the script and its programs, without append."""
    log = tmp_path / "log"
    job = f"open({str(log)!r}, 'a').write('a line of the job\\n')"
    code = (
        "import os, subprocess, sys; from anabranch.spark.submit import append_standard_error; "
        f"append_standard_error(); subprocess.run([sys.executable, '-c', {job!r}], check=True)"
    )
    with log.open("w") as file:
        for command in ([sys.executable, "-c", code], ["echo", "later"]):
            subprocess.run(command, stdout=file, stderr=file, check=True, timeout=120)
    assert log.read_text() == "a line of the job\nlater\n"
