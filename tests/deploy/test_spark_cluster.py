"""Both jobs on a Spark cluster with a PostgreSQL catalog; and a worker that is lost."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from cluster import HOSTS, SparkCluster, running_cluster
from commands import ROOT, Command, run, started
from expectations import entry
from postgres import PASSWORD, Postgres, running_postgres
from run_books import printed, words
from running import PUBLISHED, TRIED_AGAIN, publishes
from spark_ui import SparkUi
from waiting import wait_for
from world import Make, World, closed_at_the_end, past_hour, spread
from writers import BY_PYARROW, writers

from anabranch.cli import main
from anabranch.dev.services.processes import free_port
from speed_layer.pack import python_version

LONG = pytest.mark.timeout(900)
PATIENT = 400.0  # seconds to wait for a job on a cluster
PROBED = "executors: Python workers decode records"
LOST = "ExecutorLostFailure"
# The batch layer's settings from docs/reference/sizing.md.
# 60,000 records make two files, each of a task.
IN_TWO_TASKS = {"target": 4_000_000}
HANDED_OVER = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.rddBlocks.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
}
# Compaction would write the files again.
AS_STAGED = {"trigger": "1 second", "roll_up": False}
SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
}
ALLOCATED = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.maxExecutors": "2",
}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def standalone() -> Iterator[SparkCluster]:
    with running_cluster() as spark_cluster:
        yield spark_cluster


@pytest.fixture
def cluster(standalone: SparkCluster) -> SparkCluster:
    """The cluster, with both workers, whatever an earlier test did to them, and no job on them."""
    for host in HOSTS:
        if host not in standalone.alive():
            standalone.start_worker(host)
    wait_for(lambda: standalone.cores_used() == 0, "the cores of earlier jobs to be let go")
    return standalone


@pytest.fixture
def on_postgres(tmp_path: Path, environment: dict[str, Any], postgres: Postgres) -> Iterator[Make]:
    """Makes streams on PostgreSQL. Their configured master is this machine: commands differ."""
    with closed_at_the_end() as made:

        def make(conf: dict[str, str], **stream: Any) -> World:
            own = copy.deepcopy(environment)
            server = f"127.0.0.1:{postgres.port}"
            own["catalog"]["uri"] = f"postgresql+psycopg2://lake:{PASSWORD}@{server}/catalog"
            own["spark"]["conf"] |= conf
            one = World(tmp_path / f"conf{len(made)}", own, None, **stream)  # type: ignore[arg-type]
            made.append(one)
            one.create()
            return one

        yield make


def set_conf(one: World, conf: dict[str, str]) -> None:
    """Change `spark.conf` for the commands that start from now on."""
    spark = one.environment_file["spark"]
    one.set_environment(spark=spark | {"conf": spark["conf"] | conf})


def successes(ui: SparkUi) -> set[str]:
    """The hosts on which tasks succeeded."""
    return {host for host, reason in ui.tasks() if reason == "Success"}


def assert_exact(one: World, speed_log: str, batches: int) -> None:
    """Every acknowledged record once in `main`, and as many publishes as there should be."""
    assert one.contents() == one.acknowledged()
    assert len(publishes(one)) == len(PUBLISHED.findall(speed_log)) > 0
    assert len(publishes(one, "batch")) == batches


@LONG
def test_both_jobs_run_their_tasks_on_both_workers(
    on_postgres: Make, cluster: SparkCluster, postgres: Postgres, tmp_path: Path
) -> None:
    speed, batch = SparkUi(tmp_path / "speed"), SparkUi(tmp_path / "batch")
    one = on_postgres({"spark.cores.max": "2"})
    hour = past_hour(1)
    one.send([*spread(hour, 2_000, "e")])
    one.expect(
        entry("expect_column_values_to_be_unique", column="event_id"),
        entry("expect_column_values_to_match_regex", column="event_id", regex="^e-"),
    )
    set_conf(one, speed.settings)
    log = run(one, "speed", one.name, "--available-now", "--master", cluster.master)
    assert one.contents() == one.acknowledged()
    assert PROBED in log
    set_conf(one, batch.settings)
    run(one, "batch", one.name, "--hour", hour, "--master", cluster.master)
    assert one.state.served_by(hour) == "batch"
    assert_exact(one, log, batches=1)
    assert successes(speed) == successes(batch) == set(HOSTS)
    assert {app["name"] for app in cluster.view()["completedapps"]} >= {
        f"anabranch speed {one.name}", f"anabranch batch {one.name}",
    }  # fmt: skip
    of_stream = f"SELECT count(*) FROM iceberg_tables WHERE table_namespace = '{one.name}'"
    assert postgres.execute(of_stream) == [(3,)]


@LONG
def test_a_job_ends_if_executors_lack_packages(on_postgres: Make, cluster: SparkCluster) -> None:
    one = on_postgres({"spark.cores.max": "2", "spark.pyspark.python": "/nowhere/python"})
    # Few records: the batch layer needs Spark for its quality gate alone.
    one.expect(entry("expect_column_values_to_be_unique", column="event_id"))
    one.send([*spread(past_hour(1), 20, "e")])
    for layer in ("speed", "batch"):
        arguments = (layer, one.name, *(("--available-now",) if layer == "speed" else ()))
        log = run(one, *arguments, "--master", cluster.master, expect=2)
        assert "executors: expected Python workers to start, found" in log
        assert "run `anabranch pack`" in log
    assert one.rows() == []


@LONG
def test_an_archive_of_our_packages_gives_executors_their_python(
    on_postgres: Make, cluster: SparkCluster, tmp_path: Path
) -> None:
    python = Path(sys.base_prefix) / "bin" / f"python{python_version()}"
    arguments = words(printed("anabranch pack --to FOLDER", FOLDER=str(tmp_path / "packed")))
    packed = CliRunner().invoke(main, [*arguments, "--output", "json"])
    conf = json.loads(packed.stdout)["conf"] | {"spark.executorEnv.ANABRANCH_PYTHON": str(python)}
    # The path exists only where the archive is unpacked.
    assert conf["spark.pyspark.python"].startswith("./")
    ui = SparkUi(tmp_path / "ui")
    one = on_postgres({"spark.cores.max": "2"} | conf | ui.settings, speed=AS_STAGED)
    one.send([*spread(past_hour(1), 2_000, "e")])
    log = run(one, "speed", one.name, "--available-now", "--master", cluster.master)
    assert "executors: Python workers decode records" in log
    assert set(writers(one)) == {BY_PYARROW}
    assert_exact(one, log, batches=0)
    # The keys of S3 travel inside the tasks.
    secret = one.job.environment.s3.secret_key.get_secret_value()  # type: ignore[union-attr]
    [events] = (tmp_path / "ui").iterdir()
    assert "MapInArrow" in (shown := events.read_text("utf-8"))
    assert secret not in shown
    assert secret not in log


@LONG
def test_an_executor_as_in_a_pod_decodes_records(on_postgres: Make, cluster: SparkCluster) -> None:
    """The workers have too little memory, so the only executor is that of deploy/kubernetes."""
    port = free_port()
    conf = {"spark.executor.memory": "64g", "spark.driver.host": "127.0.0.1"}
    one = on_postgres(conf | {"spark.driver.port": str(port)})
    one.send([*spread(past_hour(1), 200, "e")])
    given = {
        "DRIVER_URL": f"spark://CoarseGrainedScheduler@127.0.0.1:{port}", "APPLICATION_ID": "app",
        "EXECUTOR_ID": "1", "EXECUTOR_CORES": "1", "EXECUTOR_MEMORY": "1g", "RESOURCE_PROFILE_ID": "0",
        "EXECUTOR_POD_IP": "127.0.0.1", "EXECUTOR_POD_NAME": "pod",
        "JAVA_OPT_0": "--add-opens=java.base/java.nio=ALL-UNNAMED",
    }  # fmt: skip
    pod = os.environ | {f"SPARK_{name}": value for name, value in given.items()}
    pod["PATH"] = f"{Path(sys.executable).parent}:{pod['PATH']}"
    with started(one, "speed", one.name, "--available-now", "--master", cluster.master) as speed:
        speed.until(lambda: bool(cluster.view()["activeapps"]), "the driver to listen", PATIENT)
        program, log = ROOT / "deploy" / "kubernetes" / "executor", one.folder / "executor.log"
        with log.open("wb") as output:
            executor = subprocess.Popen(
                [program], env=pod, cwd=one.folder, stdout=output, stderr=output
            )
        try:
            assert speed.wait() == 0, speed.log[-4000:] + log.read_text("utf-8")[-4000:]
        finally:
            executor.kill()
            executor.wait(30)
    assert PROBED in speed.log
    assert_exact(one, speed.log, batches=0)


@LONG
def test_streaming_and_rebuilding_jobs_share(on_postgres: Make, cluster: SparkCluster) -> None:
    one = on_postgres({"spark.cores.max": "1"})
    hour = past_hour(1)
    one.expect(entry("expect_column_values_to_be_unique", column="event_id"))
    one.send(spread(hour, 400, "past"))
    with started(one, "speed", one.name, "--master", cluster.master) as speed:
        speed.until(lambda: one.published == 400, "the past hour to be published")
        secrets = [PASSWORD, one.job.environment.s3.secret_key.get_secret_value()]  # type: ignore[union-attr]
        processes = [process for host in HOSTS for process in cluster.executors(host)]
        seen = [line for process in processes for line in shown(process)]
        assert any("CoarseGrainedExecutorBackend" in line for line in seen)
        assert not [line for line in seen if any(secret in line for secret in secrets)]
        with started(one, "batch", one.name, "--hour", hour, "--master", cluster.master) as batch:
            batch.until(
                lambda: [app["cores"] for app in cluster.view()["activeapps"]] == [1, 1],
                "each of both jobs to have a core",
            )
            one.send_now(300, "now")
            assert batch.wait() == 0, batch.log[-4000:]
        speed.until(lambda: one.published == 700, "the running hour's records to be published")
        assert speed.terminate() == 0, speed.log[-4000:]
    assert one.state.served_by(hour) == "batch"
    assert_exact(one, speed.log, batches=1)
    wait_for(lambda: cluster.cores_used() == 0, "the cores to be let go")


def shown(process: psutil.Process) -> list[str]:
    """Return the command line and the environment of a process, as `ps` shows them."""
    return [
        " ".join(process.cmdline()),
        *(f"{key}={value}" for key, value in process.environ().items()),
    ]


def kill_in_a_task(
    cluster: SparkCluster, host: str, ui: SparkUi, command: Command, when: Callable[[], bool]
) -> None:
    """Kill a worker with its executor while a task runs on it."""

    what = f"a task to run on {host}"
    command.until(lambda: pause_in_a_task(cluster, host, ui, when), what, PATIENT)
    cluster.kill_worker(host)


def pause_in_a_task(
    cluster: SparkCluster, host: str, ui: SparkUi, when: Callable[[], bool]
) -> bool:
    """Pause the executors of a host if a task runs on them; returns whether they are paused."""
    if not when() or not ui.running_tasks(host):
        return False
    # Stopped, it can end no task; what it had sent before arrives while it is asked again.
    cluster.pause_executors(host)
    if all(ui.running_tasks(host) for _ in range(20)):
        return True
    cluster.resume_executors(host)
    return False


def assert_lost_in_a_task(ui: SparkUi, host: str) -> None:
    """The hazard: a task ran on the executor that was lost, and later ones ran on what was left."""
    ends = ui.tasks()
    assert (host, LOST) in ends, ends
    after = ends[ends.index((host, LOST)) :]
    assert {h for h, reason in after if reason == "Success"} == set(HOSTS) - {host}
    reasons = [reason.lower() for reason in ui.lost_executors()]
    assert any("worker" in reason or "lost" in reason for reason in reasons)


@LONG
@pytest.mark.parametrize(
    "staged", [False, True], ids=["reading Kafka", "with the hour's files written"]
)
def test_a_worker_killed_in_the_middle_of_a_rebuild(
    on_postgres: Make, cluster: SparkCluster, tmp_path: Path, staged: bool
) -> None:
    ui, hour, host = SparkUi(tmp_path / "ui"), past_hour(1), HOSTS[1]
    one = on_postgres({"spark.cores.max": "2"}, files=IN_TWO_TASKS)
    one.send(spread(hour, 60_000, "e"))
    set_conf(one, ui.settings)
    with started(one, "batch", one.name, "--hour", hour, "--master", cluster.master) as batch:

        def is_due() -> bool:
            """The probe of the executors is over."""
            return PROBED in batch.log and (ui.finished_stages() > 0) is staged

        kill_in_a_task(cluster, host, ui, batch, is_due)
        assert batch.wait() == 0, batch.log[-4000:]
    assert_lost_in_a_task(ui, host)
    # Files of ended tasks are complete, so only Spark tries again: the lost tasks.
    assert not TRIED_AGAIN.search(batch.log), batch.log[-4000:]
    assert (one.state.accepted[hour].revision, one.state.served_by(hour)) == (1, "batch")
    assert one.contents() == one.contents("batch") == one.acknowledged()
    assert len(publishes(one, "batch")) == 1


@LONG
def test_a_worker_that_is_about_to_go_hands_over_its_part_of_the_decoded_hour(
    on_postgres: Make, cluster: SparkCluster, tmp_path: Path
) -> None:
    ui, hour, host = SparkUi(tmp_path / "ui"), past_hour(1), HOSTS[1]
    one = on_postgres({"spark.cores.max": "2"} | HANDED_OVER, files=IN_TWO_TASKS)
    one.send(spread(hour, 60_000, "e"))
    set_conf(one, ui.settings)
    with started(one, "batch", one.name, "--hour", hour, "--master", cluster.master) as batch:
        batch.until(lambda: ui.finished_stages() > 0, "the hour to be decoded")
        cluster.decommission(host)
        assert batch.wait() == 0, batch.log[-4000:]
    assert (host, "Success") in ui.tasks()
    assert ui.lost_executors(), "the hazard: its executor ended before the job did"
    assert not TRIED_AGAIN.search(batch.log), batch.log[-4000:]
    assert one.contents() == one.contents("batch") == one.acknowledged()


@LONG
def test_the_decoded_hour_survives_dynamic_allocation_of_executors(
    on_postgres: Make, cluster: SparkCluster, tmp_path: Path
) -> None:
    ui, hour = SparkUi(tmp_path / "ui"), past_hour(1)
    # Given back when idle for a second, which each is between two passes: but not those that keep a
    # part of the hour.
    one = on_postgres(
        ALLOCATED | {"spark.cores.max": "2", "spark.dynamicAllocation.executorIdleTimeout": "1s"},
        files=IN_TWO_TASKS,
    )
    one.send(spread(hour, 60_000, "e"))
    set_conf(one, ui.settings)
    log = run(one, "batch", one.name, "--hour", hour, "--master", cluster.master)
    assert successes(ui) == set(HOSTS)
    assert not TRIED_AGAIN.search(log), log[-4000:]
    assert one.contents() == one.contents("batch") == one.acknowledged()


@LONG
def test_a_worker_killed_in_the_middle_of_a_micro_batch(
    on_postgres: Make, cluster: SparkCluster, tmp_path: Path
) -> None:
    ui, host = SparkUi(tmp_path / "ui"), HOSTS[0]
    speed_conf = AS_STAGED | {"max_offsets_per_trigger": 20_000}
    one = on_postgres({"spark.cores.max": "2"}, speed=speed_conf)
    one.send_now(200_000, "e")
    set_conf(one, ui.settings)
    with started(one, "speed", one.name, "--master", cluster.master) as speed:
        kill_in_a_task(cluster, host, ui, speed, lambda: 0 < one.published < 200_000)
        speed.until(lambda: one.published == 200_000, "the rest to be published", PATIENT)
        one.send_now(100, "after")
        speed.until(lambda: one.published == 200_100, "what came later to be published", PATIENT)
        assert speed.terminate() == 0, speed.log[-4000:]
    assert_lost_in_a_task(ui, host)
    assert set(writers(one)) == {BY_PYARROW}
    assert_exact(one, speed.log, batches=0)
    assert not re.search("Traceback", speed.log)


@LONG
def test_a_speculative_attempt_beside_a_slow_one_publishes_each_record_once(
    on_postgres: Make, cluster: SparkCluster, tmp_path: Path
) -> None:
    ui, host = SparkUi(tmp_path / "ui"), HOSTS[0]
    speed_conf = AS_STAGED | {"max_offsets_per_trigger": 20_000}
    one = on_postgres({"spark.cores.max": "2"} | SPECULATIVE, speed=speed_conf)
    one.send_now(200_000, "e")
    set_conf(one, ui.settings)
    with started(one, "speed", one.name, "--master", cluster.master) as speed:
        speed.until(
            lambda: pause_in_a_task(cluster, host, ui, lambda: 0 < one.published < 200_000),
            "a slow task",
            PATIENT,
        )
        at = one.published
        speed.until(lambda: one.published > at, "another attempt to be published", PATIENT)
        cluster.resume_executors(host)
        speed.until(lambda: one.published == 200_000, "the rest to be published", PATIENT)
        assert speed.terminate() == 0, speed.log[-4000:]
    ends = {reason for _, reason in ui.tasks()}
    assert "TaskKilled" in ends, "the hazard: one of two attempts was ended"
    assert set(writers(one)) == {BY_PYARROW}
    assert_exact(one, speed.log, batches=0)
