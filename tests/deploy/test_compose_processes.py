"""The compose file's services as processes: our image built by the Dockerfile's lines, every command, health check and
stop signal of the file, with its environment and volumes; what is not run here is Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compose_file
import pytest
import yaml
from composition import Composition, hosts_of, running_composition
from dockerfile import Built, build
from waiting import wait_for
from world import past_hour

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The image of the checkout's Dockerfile."""
    return build(ROOT, tmp_path_factory.mktemp("image"))


def ran(services: Composition, name: str, *arguments: str) -> str:
    done = services.execute(name, *arguments)
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def printed_json(services: Composition, *arguments: str) -> Any:
    """What a command of ours prints as JSON."""
    return json.loads(ran(services, "speed", "anabranch", *arguments, "--output", "json"))


def until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    wait_for(condition, what, seconds, pause=2)


@pytest.mark.timeout(2400)
def test_every_service_starts_is_healthy_does_its_work_and_ends(built: Built, tmp_path: Path) -> None:
    values = compose_file.filled()
    resolved = compose_file.config(values, tmp_path)["services"]
    with running_composition(resolved, built, tmp_path, without=["grafana"]) as services:
        # Events first: Airflow begins with the hour that ended last, and skips it when the stream begins after it.
        services.up("kafka", "topic")
        sent = printed_json(
            services, "dev", "produce", "game_events", "--events", str(EVENTS), "--hours", "1.5", "--dirty"
        )
        services.up()
        assert set(services.completed) == {"topic", "apply", "airflow-init"}
        # Rows come out, on the cluster.
        until(lambda: sum(printed_json(services, "status", "game_events")["position"].values()) >= EVENTS, "rows", 300)
        until(
            lambda: printed_json(services, "status", "game_events")["lag"]["offsets"] == 0,
            "the speed layer to be at the head",
        )
        status = printed_json(services, "status", "game_events")
        assert sum(status["position"].values()) == sent["acknowledged"]
        [[dead]] = _values(printed_json(services, "query", "SELECT count(*) FROM games.game_events_dead_letters"))
        assert 0 < dead == status["dead_letters"]
        apps = json.loads(ran(services, "speed", "python", "-c", FETCH, "http://spark-master:8090/json/"))
        assert len(apps["workers"]) == 2
        assert [app["name"] for app in apps["activeapps"]], apps
        # Airflow has read the DAGs, and closes the hour before this one by itself.
        paths = ("/api/v2/dags?limit=100", "/api/v2/importErrors")

        def dags() -> set[str]:
            listing, errors = json.loads(
                ran(services, "airflow-api-server", "python", "-c", ASK, values["AIRFLOW_ADMIN_PASSWORD"], *paths)
            )
            assert errors["total_entries"] == 0, errors
            return {dag["dag_id"] for dag in listing["dags"]}

        ours = {f"anabranch_{kind}__game_events" for kind in ("hourly", "maintenance", "speed_watch")}
        until(lambda: ours <= dags(), "Airflow to read the DAGs")

        def accepted() -> bool:
            return {h["hour"]: h["state"] for h in printed_json(services, "hours", "game_events")}[
                past_hour(1)
            ] == "accepted"

        until(accepted, "Airflow to have the last hour accepted", 900)
        ran(services, "speed", "anabranch", "audit", "game_events")
        _require_metrics(services)
        took = services.down()
    staying = {name: s for name, s in resolved.items() if s["restart"] == "unless-stopped" and name != "grafana"}
    assert set(took) == {host for name, service in staying.items() for host in hosts_of(name, service)}
    killed = {host: seconds for host, (seconds, code) in took.items() if code == 137}
    assert not killed, took
    assert took["speed"][1] == 0, took


def _values(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [list(row.values()) for row in rows]


def _require_metrics(services: Composition) -> None:
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
            return bool(json.loads(ran(services, "prometheus", *line)))

        until(answers, f"data for {plain}", 180)
    rules = json.loads(ran(services, "speed", "python", "-c", FETCH, f"{source['url']}/api/v1/rules"))["data"]["groups"]
    states = [(rule["name"], rule["health"]) for group in rules for rule in group["rules"]]
    assert [health for _, health in states] == ["ok"] * len(alerts), states
