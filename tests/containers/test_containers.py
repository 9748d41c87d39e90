"""The image and the compose file in real containers, from a clean checkout: `make test-containers`.

CONTAINERS_WITHOUT names services that are left out, such as `prometheus grafana` on a machine without their images.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import docker_compose
import pytest
import yaml
from docker_compose import Project, docker
from waiting import wait_for
from world import past_hour

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"
SOURCES = ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
WITHOUT = os.environ.get("CONTAINERS_WITHOUT", "").split()
NAME = f"anabranch-test-{os.getpid()}"
MOST_BYTES = 2_000_000_000
EVENTS = 2000
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
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if missing := docker_compose.find_missing():
        pytest.exit(f"make test-containers: {missing}", returncode=2)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, and nothing else, with an .env."""
    folder = tmp_path_factory.mktemp("checkout") / "anabranch"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True, timeout=120)
    subprocess.run(["sh", "deploy/dotenv.sh"], cwd=folder, check=True, timeout=60)
    status = subprocess.run(["git", "status", "--short"], cwd=folder, capture_output=True, text=True, check=True)
    assert status.stdout == "", "expected git to ignore what was made"
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
    [image] = json.loads(docker("image", "inspect", project.image))
    assert image["Size"] <= MOST_BYTES, f"expected {MOST_BYTES} bytes at most, found {image['Size']}"

    def inside(*command: str) -> str:
        return docker("run", "--rm", "--network", "none", project.image, *command)

    assert inside("find", "/opt", "/usr", "-writable", "-not", "-type", "l").split() == []
    assert inside("find", "/opt", "/home", "-name", "s3proxy*.jar", "-o", "-name", "kafka_2*.jar") == ""
    assert "[]" in inside("python", "-c", "from anabranch.spark import jars; print(jars.cached()[1])")
    assert "Kafka to one exact Iceberg table" in inside("anabranch", "--help")
    assert inside("id", "-u") == "10001\n"


def test_a_change_of_conf_dags_or_code_downloads_nothing(project: Project, checkout: Path) -> None:
    for name in ("conf/anabranch.yaml", "dags/anabranch_hourly.py", "anabranch/common/health.py"):
        with (checkout / name).open("a", encoding="utf-8") as file:
            file.write("\n# changed\n")
    tag = f"{NAME}:changed"
    done = docker_compose.run(
        "buildx", "build", "--progress", "plain", "--load", "--tag", tag, str(checkout), seconds=900
    )
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=checkout, check=True)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = dict(re.findall(r"^#(\d+) (\[.*)$", done.stderr, re.MULTILINE))
    cached = set(re.findall(r"^#(\d+) CACHED$", done.stderr, re.MULTILINE))
    ran = [step for number, step in steps.items() if number not in cached and "internal" not in step]
    docker("image", "rm", "--force", tag)
    # The base image is looked up, the package installed, the folders copied; no dependency, no jar.
    assert ran and all(re.search(r"FROM|uv pip install|COPY (dags|conf) |WORKDIR|load", step) for step in ran), ran


@pytest.mark.timeout(3600)
def test_every_service_works_and_kills_and_new_containers_lose_and_repeat_nothing(
    project: Project, checkout: Path
) -> None:
    # Events first: Airflow begins with the hour that ended last, and skips it when the stream begins after it.
    project.compose("up", "--detach", "topic", seconds=300)
    until(lambda: project.states()["topic"] == [("exited", 0)], "the topic")
    sent = produce(project, 1.5)
    project.compose("up", "--detach", *project.services, seconds=600)
    until(lambda: not unhealthy(project), "every service to be healthy", 600, lambda: str(unhealthy(project)))
    require_exact(project, sent)
    require_least_rights(project)
    # The job that hangs, and the one that is killed.
    project.execute("speed", "pkill", "-STOP", "java")
    until(lambda: health(project, "--within", "10") == 1, "a job that hangs to be unhealthy")
    project.execute("speed", "pkill", "-CONT", "java")
    until(lambda: health(project, "--within", "10") == 0, "it to be healthy again")
    for service in ("speed", "kafka", "s3", "postgres", "spark-worker"):
        docker("kill", *project.compose("ps", "--quiet", service).split())
        sent += produce(project, 0.01) if service in ("speed", "spark-worker") else 0
        project.compose("up", "--detach", *project.services, seconds=600)
    until(lambda: not unhealthy(project), "every service to be healthy again", 600, lambda: str(unhealthy(project)))
    require_exact(project, sent)
    # A process that dies by itself is started again by the engine, which a later check finds.
    before = project.container("speed")["RestartCount"]
    project.execute("speed", "pkill", "-KILL", "java")
    until(lambda: project.container("speed")["RestartCount"] > before, "the engine to start it again")
    sent += produce(project, 0.01)
    require_exact(project, sent)
    require_airflow(project, checkout)
    if "prometheus" not in WITHOUT:
        require_metrics(project)
    # Each ends within its time, and the volumes have it all.
    project.compose("stop", seconds=300)
    assert [states for states in project.states().values() if any(code == 137 for _, code in states)] == []
    project.compose("down", seconds=300)
    project.compose("up", "--detach", *project.services, seconds=600)
    until(lambda: not unhealthy(project), "every service to be healthy after down and up", 600)
    sent += produce(project, 0.01)
    require_exact(project, sent)
    project.execute("speed", "anabranch", "audit", "game_events", seconds=300)


def test_the_image_of_a_new_user_is_built_from_the_wheel_alone(project: Project, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    subprocess.run([UV, "build", "--wheel", "--out-dir", wheels], cwd=project.folder, check=True, timeout=300)
    [wheel] = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "anabranch.cli", "init", tmp_path / "mine"], check=True, timeout=60)
    [network] = json.loads(docker("network", "inspect", "bridge"))
    host = network["IPAM"]["Config"][0]["Gateway"]
    tag = f"{NAME}:new-user"
    with ThreadingHTTPServer((host, 0), functools.partial(SimpleHTTPRequestHandler, directory=wheels)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        given = f"ANABRANCH=anabranch[airflow,lineage] @ http://{host}:{server.server_port}/{wheel.name}"
        docker(
            "buildx", "build", "--load", "--tag", tag, "--build-arg", given, str(tmp_path / "mine"), seconds=2400
        )  # fmt: skip
        server.shutdown()
    script = (
        "import anabranch, os, shutil; from anabranch import config; from anabranch.spark import jars; "
        "print(anabranch.__file__, *map(shutil.which, ('anabranch', 'airflow', 'spark-class', 'spark-submit')), "
        "config.stream_names(None), len(os.listdir('/opt/anabranch/dags')), jars.cached()[1])"
    )
    [image] = json.loads(docker("image", "inspect", tag))
    words = docker("run", "--rm", "--read-only", "--network", "none", tag, "python", "-c", script).split(maxsplit=5)
    docker("image", "rm", "--force", tag)
    assert image["Size"] <= MOST_BYTES, f"expected {MOST_BYTES} bytes at most, found {image['Size']}"
    assert words[0].startswith("/opt/anabranch/.venv/lib/")
    assert [Path(file).parent for file in words[1:5]] == [Path("/opt/anabranch/.venv/bin")] * 4
    assert words[5].strip() == "('game_events',) 6 []"


def until(
    condition: Callable[[], bool], what: str, seconds: float = 300, found: Callable[[], str] = lambda: ""
) -> None:
    try:
        wait_for(condition, what, seconds, pause=2)
    except AssertionError as error:
        raise AssertionError(f"{error}, found {found()}") from None


def produce(project: Project, hours: float) -> int:
    """Send events from a container of ours beside the others; returns how many Kafka has acknowledged."""
    command = ["anabranch", "dev", "produce", "game_events", "--events", str(EVENTS), "--hours", str(hours), "--dirty"]
    printed = project.compose("run", "--rm", "--no-deps", "-T", "apply", *command, "--output", "json", seconds=300)
    acknowledged: int = json.loads(printed)["acknowledged"]
    return acknowledged


def unhealthy(project: Project) -> dict[str, list[tuple[str, int]]]:
    """The services that are neither healthy nor ended as they should, with their state."""
    states = project.states()
    wanted = {name: ("healthy" if "healthcheck" in s else "exited", 0) for name, s in project.services.items()}
    return {name: states.get(name, []) for name, state in wanted.items() if set(states.get(name, [])) != {state}}


def health(project: Project, *options: str) -> int:
    """The exit code of the speed layer's check."""
    try:
        project.execute("speed", "anabranch", "health", "/tmp/speed.health", *options)
    except AssertionError as error:
        if "unhealthy: " in str(error):
            return 1
        raise
    return 0


def require_exact(project: Project, acknowledged: int) -> None:
    """Every record that Kafka acknowledged is one row, one dead letter, or a duplicate that the batch layer removed."""

    def value(query: str) -> int:
        [row] = project.printed_json("query", query)
        [number] = row.values()
        return int(number)

    def counts() -> dict[str, int]:
        status, hours = project.printed_json("status", "game_events"), project.printed_json("hours", "game_events")
        return {
            "waiting": status["lag"]["offsets"],
            "read": sum(status["position"].values()),
            "rows": value("SELECT count(*) FROM games.game_events"),
            "offsets": value("SELECT count(DISTINCT (kafka_partition, kafka_offset)) FROM games.game_events"),
            "dead": value("SELECT count(*) FROM games.game_events_dead_letters"),
            "duplicates": sum(h["counts"]["duplicate"] for h in hours if h["served"] == "batch"),
        }

    def is_exact() -> bool:
        # An hour may change hands between two questions, so they are asked again until the numbers agree.
        seen.update(counts())
        return (
            seen["waiting"] == 0
            and seen["read"] == acknowledged
            and seen["rows"] == seen["offsets"]
            and seen["dead"] > 0
            and seen["rows"] + seen["dead"] + seen["duplicates"] == acknowledged
        )

    seen: dict[str, int] = {}
    until(is_exact, f"{acknowledged} records", 300, lambda: str(seen))


def require_least_rights(project: Project) -> None:
    for service in project.services:
        for identity in project.compose("ps", "--all", "--quiet", service).split():
            [found] = json.loads(docker("inspect", identity))
            host = found["HostConfig"]
            assert host["CapDrop"] == ["ALL"] and not host["CapAdd"], service
            assert host["SecurityOpt"] == ["no-new-privileges:true"], service
            assert host["ReadonlyRootfs"] is (service not in ("kafka", "topic")), service
            assert host["LogConfig"]["Config"].keys() == {"max-size", "max-file"}, service
            assert host["Memory"] > 0 and host["NanoCpus"] > 0 and host["PidsLimit"] > 0, service
    for line in ("echo >/opt/anabranch/conf/x", "echo >/var/lib/anabranch/x", "echo >/home/anabranch/x"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            project.execute("speed", "sh", "-c", line)


def require_airflow(project: Project, checkout: Path) -> None:
    """It has read the DAGs, and closes the hour before this one by itself."""
    values = dict(re.findall(r"^(\w+)=(.*)$", (checkout / ".env").read_text(encoding="utf-8"), re.MULTILINE))
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

    def accepted() -> bool:
        return {h["hour"]: h["state"] for h in project.printed_json("hours", "game_events")}[past_hour(1)] == "accepted"

    until(accepted, "Airflow to have the last hour accepted", 900)


def require_metrics(project: Project) -> None:
    """Everything that the dashboard shows and the alerts ask about is there, and no rule fails."""
    [source] = yaml.safe_load(SOURCES.read_text(encoding="utf-8"))["datasources"]
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/anabranch.json").read_text(encoding="utf-8"))
    asked_for = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    asked_for |= {name for expr in alerts for name in re.findall(r"\banabranch_\w+|up\{[^}]*\}", expr)}
    assert len(asked_for) > 15
    for expr in sorted(asked_for):
        plain = expr.replace("$stream", ".+").replace("$__rate_interval", "2m")

        def answers(plain: str = plain) -> bool:
            line = ("promtool", "query", "instant", "--format=json", source["url"], plain)
            return bool(json.loads(project.execute("prometheus", *line)))

        until(answers, f"data for {plain}", 180)
    rules: Any = json.loads(project.execute("speed", "python", "-c", FETCH, f"{source['url']}/api/v1/rules"))
    states = [rule["health"] for group in rules["data"]["groups"] for rule in group["rules"]]
    assert states == ["ok"] * len(alerts), rules
