"""The image and the compose file in real containers, from a clean checkout: `make test-suite WHAT=containers`.

CONTAINERS_WITHOUT names services that are left out, such as `prometheus grafana` on a machine
without their images.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker_compose
import installation
import pytest
import yaml
from docker_compose import Project, docker
from programs import output_of
from waiting import wait_for
from world import past_hour

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
WITHOUT = os.environ.get("CONTAINERS_WITHOUT", "").split()
NAME = f"anabranch-test-{os.getpid()}"
MOST_BYTES = 2_000_000_000
EVENTS = 2000
PRODUCE = (
    "anabranch", "dev", "produce", "game_events", "--dirty", "--output", "json",
)  # fmt: skip
# Logs in with the password of .env, and asks Airflow's API.
ASK = """\
import json, sys, urllib.request
def ask(path, body=None, **headers):
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request("http://airflow-api-server:8080" + path, body, headers)
    return json.load(urllib.request.urlopen(request, timeout=30))
token = ask("/auth/token", json.dumps({"username": "admin", "password": sys.argv[1]}).encode())["access_token"]
print(json.dumps([ask(path, Authorization="Bearer " + token) for path in sys.argv[2:]]))
"""
METRICS = "http://page:8090/metrics"
FETCH = (
    "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], "
    "timeout=30).read().decode())"
)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if missing := docker_compose.find_missing():
        pytest.exit(f"make test-suite WHAT=containers: {missing}", returncode=2)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed files, and no others, with an .env."""
    folder = tmp_path_factory.mktemp("checkout") / "anabranch"
    output_of("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder)
    output_of("sh", "deploy/dotenv.sh", cwd=folder)
    made = output_of("git", "status", "--short", cwd=folder)
    assert made == "", "expected git to ignore what was made"
    return folder


@pytest.fixture(scope="module")
def project(checkout: Path) -> Iterator[Project]:
    """The built image and its services, none started yet; at the end everything is gone."""
    one = Project(checkout, NAME, WITHOUT)
    one.compose("build", seconds=2400)
    try:
        yield one
    finally:
        one.compose("down", "--volumes", "--timeout", "10", seconds=300)
        docker("image", "rm", "--force", one.image)


def test_the_image_is_small_and_its_user_owns_nothing_that_it_runs(project: Project) -> None:
    require_small(project.image)

    def inside(*command: str) -> str:
        return docker("run", "--rm", "--network", "none", project.image, *command)

    assert inside("find", "/opt", "/usr", "-writable", "-not", "-type", "l").split() == []
    found = inside("find", "/opt", "/home", "-name", "s3proxy*.jar", "-o", "-name", "kafka_2*.jar")
    assert found == ""
    missing = "from anabranch.spark import jars; print(jars.cached()[1])"
    assert "[]" in inside("python", "-c", missing)
    assert "Kafka to one exact Iceberg table" in inside("anabranch", "--help")
    assert inside("id", "-u") == "10001\n"


def test_a_change_of_conf_dags_or_code_downloads_nothing(project: Project, checkout: Path) -> None:
    change(
        checkout, "conf/anabranch.yaml", "dags/anabranch_hourly.py", "anabranch/common/health.py"
    )
    ran = rebuilt_steps(checkout)
    output_of("git", "checkout", "--quiet", ".", cwd=checkout)
    # The base image is looked up, the package installed, the folders copied; no dependency, no jar.
    assert ran and all(
        re.search(r"FROM|uv pip install|cp -rL /src/dags|COPY conf |WORKDIR|load", step)
        for step in ran
    ), ran


@pytest.mark.timeout(3600)
def test_services_work_and_kills_lose_and_repeat_nothing(project: Project) -> None:
    # Events first: Airflow begins with the hour that ended last, and skips it when the stream
    # begins after it.
    sent = begin(project)
    before_last = past_hour(2)
    # Kills of both layers, and of a worker with their executors, while records flow.
    with Flow(project) as flow:
        start(project)
        until(lambda: runs(project, "airflow-scheduler", "anabranch batch"), "a rebuild", 600)
        kill(project, "airflow-scheduler")
        start(project)
        await_health(project, "again")
        require_batch_survives_a_kill(project, before_last)
        for service in ("speed", "spark-worker"):
            kill(project, service)
            start(project)
    sent += flow.acknowledged
    require_exact(project, sent)
    require_least_rights(project)
    # Kills of what both layers need.
    for service in ("kafka", "s3", "postgres"):
        kill(project, service)
        start(project)
    sent += produce(project, 0.01)
    require_exact(project, sent)


@pytest.mark.timeout(3600)
def test_what_hangs_or_restarts_is_unhealthy_and_a_kill_of_all_loses_nothing(
    project: Project, checkout: Path
) -> None:
    project.compose("down", "--volumes", "--timeout", "10", seconds=300)
    sent = begin(project)
    start(project)
    # A stop is no restart: the speed layer is healthy again.
    stop_and_start(project, "speed")
    await_health(project, "after a stop")
    # The job that hangs.
    project.execute("speed", "pkill", "-STOP", "java")
    until(lambda: "within 10 s" in fault(project, "--within", "10"), "a hung job to be unhealthy")
    project.execute("speed", "pkill", "-CONT", "java")
    until(lambda: fault(project, "--within", "10") == "", "it to be healthy again")
    # The job that ends again and again: the engine starts it again, it makes progress, and is
    # unhealthy. A job that hung for long may have been started again already.
    for _ in range(2):
        before = restarts(project)
        project.execute("speed", "pkill", "-KILL", "java")
        until(lambda n=before: restarts(project) > n, "the engine to start it again")
        until(lambda: fault(project, "--liveness") == "", "it to make progress")
    assert "fewer than 2 restarts" in fault(project), "expected two restarts to make it unhealthy"
    sent += produce(project, 0.01)
    require_exact(project, sent)
    stop_and_start(project, "speed")
    require_airflow(project, checkout)
    if "prometheus" not in WITHOUT:
        require_metrics(project)
    # Every container at once, as when the machine loses its power, with records that no layer has
    # read.
    sent += produce(project, 0.01)
    kill(project, *project.services)
    start(project)
    await_health(project, "after a kill of all")
    require_exact(project, sent)
    # Each ends within its time, and the volumes have it all.
    project.compose("stop", seconds=300)
    states = project.states().items()
    killed = {name: of for name, of in states if any(code == 137 for _, code in of)}
    assert killed == {}, "expected each to end before its stop_grace_period"
    project.compose("down", seconds=300)
    start(project)
    await_health(project, "after down and up")
    sent += produce(project, 0.01)
    require_exact(project, sent)
    project.execute("speed", "anabranch", "audit", "game_events", seconds=300)


@pytest.mark.timeout(3600)
def test_the_image_from_the_wheel_alone_runs_both_layers(project: Project, tmp_path: Path) -> None:
    # Two projects at once need much memory.
    project.compose("down", "--volumes", "--timeout", "10", seconds=300)
    folder = tmp_path / "mine"
    output_of(sys.executable, "-m", "anabranch.cli", "init", folder)
    installation.build_wheel(folder / "wheels", project.folder)
    output_of("sh", "deploy/dotenv.sh", cwd=folder)
    mine = Project(folder, f"{NAME}-mine", WITHOUT)
    mine.compose("build", seconds=2400)
    change(folder, "conf/anabranch.yaml", "dags/anabranch_hourly.py")
    ran = rebuilt_steps(folder)
    assert ran and all(re.search(r"FROM|COPY (dags|conf) |WORKDIR|load", step) for step in ran), ran
    try:
        require_complete_image(mine.image)
        mine.compose("up", "--detach", "speed", seconds=600)
        sent = produce(mine, 1.5)
        require_exact(mine, sent)
        mine.compose(
            "run", "--rm", "--no-deps", "-T", "speed", "anabranch", "batch", "game_events",
            seconds=600,
        )  # fmt: skip
        states = hours_of(mine)
        assert list(states.values()).count("accepted") >= 1, states
        require_exact(mine, sent)
    finally:
        mine.compose("down", "--volumes", "--timeout", "10", seconds=300)
        docker("image", "rm", "--force", mine.image)


def change(folder: Path, *names: str) -> None:
    for name in names:
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write("\n# changed\n")


def rebuilt_steps(folder: Path, *options: str) -> list[str]:
    """Build the folder's image once more; the steps that BuildKit did not find in its cache."""
    tag = f"{NAME}:changed"
    command = (
        "buildx", "build", "--progress", "plain", "--load", "--tag", tag, *options, str(folder),
    )  # fmt: skip
    done = docker_compose.run(*command, seconds=900)
    assert done.returncode == 0, done.stderr[-3000:]
    docker("image", "rm", "--force", tag)
    steps = dict(re.findall(r"^#(\d+) (\[.*)$", done.stderr, re.MULTILINE))
    cached = set(re.findall(r"^#(\d+) CACHED$", done.stderr, re.MULTILINE))
    return [text for n, text in steps.items() if n not in cached and "internal" not in text]


def require_small(image: str) -> None:
    [found] = json.loads(docker("image", "inspect", image))
    assert found["Size"] <= MOST_BYTES, f"expected at most {MOST_BYTES}, found {found['Size']}"


def hours_of(project: Project) -> dict[str, str]:
    """The state of each hour."""
    return {h["hour"]: h["state"] for h in project.printed_json("hours", "game_events")}


def require_complete_image(image: str) -> None:
    """The package, Airflow, DAGs, configuration and all jars, in at most MOST_BYTES."""
    require_small(image)
    script = (
        "import anabranch, os, shutil; from anabranch import config; from anabranch.spark import "
        "jars; print(anabranch.__file__, *map(shutil.which, ('anabranch', 'airflow', "
        "'spark-class', 'spark-submit')), config.stream_names(None), "
        "sorted(os.listdir('/opt/anabranch/dags')), jars.cached()[1])"
    )
    words = docker(
        "run", "--rm", "--read-only", "--network", "none", image, "python", "-c", script
    ).split(maxsplit=5)
    assert words[0].startswith("/opt/anabranch/.venv/lib/")
    assert [Path(file).parent for file in words[1:5]] == [Path("/opt/anabranch/.venv/bin")] * 4
    dags = sorted(file.name for file in (ROOT / "dags").iterdir() if file.is_file())
    assert words[5].strip() == f"('game_events',) {dags} []"


def until(
    condition: Callable[[], bool],
    what: str,
    seconds: float = 300,
    found: Callable[[], str] = lambda: "",
) -> None:
    try:
        wait_for(condition, what, seconds, pause=2)
    except AssertionError as error:
        raise AssertionError(f"{error}, found {found()}") from None


def begin(project: Project) -> int:
    """Create the topic, and send events of the last hours; returns how many."""
    project.compose("up", "--detach", "topic", seconds=300)
    until(lambda: project.states()["topic"] == [("exited", 0)], "the topic")
    return produce(project, 2.5)


def await_health(project: Project, when: str) -> None:
    what = f"every service to be healthy {when}"
    until(lambda: not unhealthy(project), what, 600, lambda: str(unhealthy(project)))


def start(project: Project) -> None:
    project.compose("up", "--detach", *project.services, seconds=600)


def stop_and_start(project: Project, service: str) -> None:
    project.compose("stop", service)
    start(project)


def kill(project: Project, *services: str) -> None:
    """Send SIGKILL to the services' containers, all at once."""
    running = [one["ID"] for one in project.containers(*services) if one["State"] == "running"]
    docker("kill", *running)

    def ended() -> bool:
        return all(one["State"] == "exited" for one in project.containers(*services))

    until(ended, "the containers to end")


def runs(project: Project, service: str, name: str) -> bool:
    """Whether the service's container is up and a command line in it has this name."""
    running = [one["ID"] for one in project.containers(service) if one["State"] == "running"]
    return any(
        docker_compose.run("exec", one, "pgrep", "--full", name).returncode == 0 for one in running
    )


def require_batch_survives_a_kill(project: Project, hour: str) -> None:
    """The batch layer in a container: killed while it rebuilds the hour, and run again."""
    # The speed layer's service, since its temporary files are on the disk.
    job = ("speed", "anabranch", "batch", "game_events", "--hour", hour)
    container = project.compose("run", "--detach", "--no-deps", *job).strip()
    try:
        logs = functools.partial(docker_compose.run, "logs", container)
        until(
            lambda: "rebuilding hour" in logs().stderr + logs().stdout,
            "the batch layer to rebuild",
            300,
            lambda: logs().stderr[-3000:],
        )
        docker("kill", container)
    finally:
        docker("rm", "--force", "--volumes", container)
    states = hours_of(project)
    assert states[hour] != "accepted", f"expected the kill before its publish, found {states}"
    project.compose("run", "--rm", "--no-deps", "-T", *job, seconds=600)
    assert hours_of(project)[hour] == "accepted"


def produce(project: Project, hours: float) -> int:
    """Send events from a container of ours; the number that Kafka has acknowledged."""
    command = [*PRODUCE, "--events", str(EVENTS), "--hours", str(hours)]
    printed = project.compose("run", "--rm", "--no-deps", "-T", "apply", *command, seconds=300)
    acknowledged: int = json.loads(printed)["acknowledged"]
    return acknowledged


class Flow:
    """Events that a container sends without end; `acknowledged` says how many, at the end."""

    acknowledged = 0

    def __init__(self, project: Project) -> None:
        command = [*PRODUCE, "--events", "100000000", "--rate", "50"]
        run = ("run", "--detach", "--no-deps", "apply")
        self._container = project.compose(*run, *command).strip()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            docker("kill", "--signal", "INT", self._container)
            docker("wait", self._container)
            done = docker_compose.run("logs", self._container)
            assert done.stdout, f"expected how many were acknowledged, found {done.stderr[-3000:]}"
            printed = json.loads(done.stdout)
        finally:
            docker("rm", "--force", "--volumes", self._container)
        self.acknowledged = printed["acknowledged"]
        assert self.acknowledged > 0 and printed["failed"] == 0, printed


def unhealthy(project: Project) -> dict[str, list[tuple[str, int]]]:
    """The services that are neither healthy nor ended as they should, with their state."""
    states = project.states()
    wanted = {
        name: ("healthy" if "healthcheck" in s else "exited", 0)
        for name, s in project.services.items()
    }
    return {
        name: states.get(name, [])
        for name, state in wanted.items()
        if set(states.get(name, [])) != {state}
    }


def fault(project: Project, *options: str) -> str:
    """Return the error of the speed layer's health check; empty if it is healthy."""
    try:
        project.execute("speed", "anabranch", "health", "/tmp/speed.health", *options)
    except AssertionError as error:
        return str(error)
    return ""


def restarts(project: Project) -> int:
    """Return the number of restarts of the speed layer by the engine since it was last stopped."""
    [container] = project.inspect("speed")
    return int(container["RestartCount"])


def require_exact(project: Project, acknowledged: int) -> None:
    """Every acknowledged record is one row, one dead letter, or a duplicate that was removed."""

    def value(query: str) -> int:
        [row] = project.printed_json("query", query)
        [number] = row.values()
        return int(number)

    def counts() -> dict[str, int]:
        status = project.printed_json("status", "game_events")
        hours = project.printed_json("hours", "game_events")
        return {
            "waiting": status["lag"]["offsets"],
            "read": sum(status["position"].values()),
            "rows": value("SELECT count(*) FROM games.game_events"),
            "offsets": value(
                "SELECT count(DISTINCT (kafka_partition, kafka_offset)) FROM games.game_events"
            ),
            "dead": value("SELECT count(*) FROM games.game_events_dead_letters"),
            "duplicates": sum(h["counts"]["duplicate"] for h in hours if h["served"] == "batch"),
        }

    def is_exact() -> bool:
        # An hour may change hands between two questions, so they are asked again until the numbers
        # agree.
        seen.update(counts())
        return (
            seen["waiting"] == 0
            and seen["read"] == acknowledged
            and seen["rows"] == seen["offsets"]
            and seen["dead"] > 0
            and seen["rows"] + seen["dead"] + seen["duplicates"] == acknowledged
        )

    seen: dict[str, int] = {}
    until(is_exact, f"{acknowledged} records", 600, lambda: str(seen))


def require_least_rights(project: Project) -> None:
    for service in project.services:
        for container in project.inspect(service):
            host = container["HostConfig"]
            assert host["CapDrop"] == ["ALL"] and not host["CapAdd"], service
            assert host["SecurityOpt"] == ["no-new-privileges:true"], service
            assert host["ReadonlyRootfs"] is (service not in ("kafka", "topic")), service
            assert host["LogConfig"]["Config"].keys() == {"max-size", "max-file"}, service
            assert host["Memory"] > 0 and host["NanoCpus"] > 0 and host["PidsLimit"] > 0, service
    for folder in ("opt/anabranch/conf", "var/lib/anabranch", "home/anabranch"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            project.execute("speed", "sh", "-c", f"echo >/{folder}/x")


def require_airflow(project: Project, checkout: Path) -> None:
    """Require that Airflow has read the DAGs and closes the previous hour by itself."""
    values = dict(re.findall(r"^(\w+)=(.*)$", (checkout / ".env").read_text("utf-8"), re.MULTILINE))
    paths = ("/api/v2/dags?limit=100", "/api/v2/importErrors")

    def dags() -> set[str]:
        asked = project.execute(
            "airflow-api-server", "python", "-c", ASK, values["AIRFLOW_ADMIN_PASSWORD"], *paths
        )  # fmt: skip
        listing, errors = json.loads(asked)
        assert errors["total_entries"] == 0, errors
        return {dag["dag_id"] for dag in listing["dags"]}

    ours = {f"anabranch_{kind}__game_events" for kind in ("hourly", "maintenance", "speed_watch")}
    until(lambda: ours <= dags(), "Airflow to read the DAGs")
    # The next hour may begin while this waits, and Airflow needs minutes more for the hour that
    # ended then.
    last = past_hour(1)
    what, states = f"Airflow to have {last} accepted", lambda: str(hours_of(project))
    until(lambda: hours_of(project)[last] == "accepted", what, 900, states)


def require_metrics(project: Project) -> None:
    """Everything that the dashboard shows and the alerts ask about is there, and no rule fails."""
    [source] = yaml.safe_load(SOURCES.read_text("utf-8"))["datasources"]
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/anabranch.json").read_text("utf-8"))
    asked_for = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    file = ROOT / "deploy" / "prometheus" / "alerts.yml"
    groups = yaml.safe_load(file.read_text("utf-8"))["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    asked_for |= {name for e in alerts for name in re.findall(r"\banabranch_\w+|up\{[^}]*\}", e)}
    assert len(asked_for) > 15
    # No record has an unknown field, so this metric has no value, only its description.
    asked_for.remove("anabranch_unknown_fields")
    metrics = project.execute("speed", "python", "-c", FETCH, METRICS)
    assert "# HELP anabranch_unknown_fields " in metrics
    for expr in sorted(asked_for):
        plain = expr.replace("$stream", ".+").replace("$__rate_interval", "2m")

        def answers(plain: str = plain) -> bool:
            line = ("promtool", "query", "instant", "--format=json", source["url"], plain)
            return bool(json.loads(project.execute("prometheus", *line)))

        until(answers, f"data for {plain}", 180)
    rules: Any = json.loads(
        project.execute("speed", "python", "-c", FETCH, f"{source['url']}/api/v1/rules")
    )
    states = [rule["health"] for group in rules["data"]["groups"] for rule in group["rules"]]
    assert states == ["ok"] * len(alerts), rules
