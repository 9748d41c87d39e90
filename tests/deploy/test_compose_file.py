"""The compose file, Dockerfiles, alerts and dashboard, each as its own tool reads it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_file
import go_tools
import pytest
import yaml

from anabranch.cli import main

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "anabranch.json"


def run(*command: object) -> str:
    done = subprocess.run(
        [str(c) for c in command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_client_reads_the_file_and_every_value_comes_from_env(tmp_path: Path) -> None:
    values = compose_file.filled()
    services = compose_file.config(values, tmp_path)["services"]
    assert {
        "kafka", "s3", "postgres", "spark-master", "spark-worker", "speed", "page", "prometheus",
        "grafana",
    } < set(services)  # fmt: skip
    speed = services["speed"]
    assert speed["command"] == [
        "anabranch", "speed", "game_events", "--health", "/tmp/speed.health",
    ]  # fmt: skip
    assert speed["environment"]["AWS_SECRET_ACCESS_KEY"] == values["AWS_SECRET_ACCESS_KEY"]
    assert values["POSTGRES_PASSWORD"] in speed["environment"]["ANABRANCH_CATALOG"]
    assert services["spark-worker"]["deploy"]["replicas"] == 2
    assert services["kafka"]["ports"][0]["host_ip"] == "127.0.0.1"


def test_one_process_serves_a_group_with_its_profile_alone(tmp_path: Path) -> None:
    values = compose_file.filled()
    assert "speed-group" not in compose_file.config(values, tmp_path)["services"]
    grouped = values | {"ANABRANCH_GROUP": "fifty"}
    services = compose_file.config(grouped, tmp_path, profile="group")["services"]
    [program, name, *arguments] = services["speed-group"]["command"]
    parsed = main.commands[name].make_context(name, list(arguments)).params
    assert (program, name, parsed["group"]) == ("anabranch", "speed", "fifty")
    health = services["speed-group"]["healthcheck"]["test"]
    assert parsed["health"] == health[-1] == services["speed"]["healthcheck"]["test"][-1]
    assert set(services["speed-group"]["depends_on"]) == {"image", "apply"}


@pytest.mark.parametrize("name", compose_file.NAMES)
def test_without_one_of_the_values_nothing_starts(name: str, tmp_path: Path) -> None:
    missing = rf"required variable {name} is missing a value: run sh deploy/dotenv\.sh"
    with pytest.raises(ValueError, match=missing):
        compose_file.config({**compose_file.filled(), name: ""}, tmp_path)


def test_the_client_judges_by_the_schema(tmp_path: Path) -> None:
    wrong = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    wrong["services"]["kafka"]["healtcheck"] = {}
    file = tmp_path / "docker-compose.yml"
    file.write_text(yaml.safe_dump(wrong), "utf-8")
    with pytest.raises(ValueError, match="healtcheck"):
        compose_file.config(compose_file.filled(), tmp_path, file)


def test_the_file_of_a_new_user_reads_alike(tmp_path: Path) -> None:
    run(sys.executable, "-m", "anabranch.cli", "init", tmp_path / "mine")
    values = compose_file.filled()
    theirs = compose_file.config(values, tmp_path, tmp_path / "mine" / "docker-compose.yml")
    ours = compose_file.config(values, tmp_path)
    mine = json.dumps(theirs).replace(str(tmp_path / "mine"), "HERE")
    assert mine == json.dumps(ours).replace(str(ROOT), "HERE")


@pytest.mark.parametrize("file", ["Dockerfile", "anabranch/starter_files/Dockerfile"])
def test_hadolint_finds_nothing_but_what_the_file_names(file: str, tmp_path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    assert run(hadolint, "--failure-threshold", "style", ROOT / file) == ""
    named = (ROOT / file).read_text("utf-8")
    assert named.count("hadolint ignore=") == 1
    without = tmp_path / "Dockerfile"
    without.write_text(named.replace("# hadolint ignore=DL3008\n", ""), "utf-8")
    done = subprocess.run([hadolint, "--no-color", without], capture_output=True, text=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["DL3008"]


def test_prometheus_own_tool_reads_its_configuration_and_alerts() -> None:
    file = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    assert "17 rules found" in run(go_tools.ensure(go_tools.PROMTOOL), "check", "config", file)


def test_each_alert_fires_when_it_should_and_for_the_stream_concerned(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "alerts_test.yml").read_text("utf-8")
    groups, tests = yaml.safe_load(ALERTS.read_text())["groups"], yaml.safe_load(text)["tests"]
    rules = {rule["alert"] for group in groups for rule in group["rules"]}
    assert rules == {one["alertname"] for test in tests for one in test["alert_rule_test"]}
    file = tmp_path / "alerts_test.yml"
    file.write_text(text.replace("RULES", str(ALERTS)), "utf-8")
    assert "SUCCESS" in run(go_tools.ensure(go_tools.PROMTOOL), "test", "rules", file)


def test_the_dashboard_is_valid_by_grafanas_schema() -> None:
    """Grafana's own models keep all of it: no field is unknown, misplaced or of another kind."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    written: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    known = json.loads(json.dumps(Dashboard.from_json(written), cls=JSONEncoder))
    assert _kept(written, known) == written
    file = ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml"
    [source] = yaml.safe_load(file.read_text())["datasources"]
    panels = written["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels) == 22


def _kept(written: Any, known: Any) -> Any:
    """Return the part of `written` that `known` contains in the same places."""
    if isinstance(written, dict) and isinstance(known, dict):
        return {key: _kept(value, known[key]) for key, value in written.items() if key in known}
    if isinstance(written, list) and isinstance(known, list):
        return [_kept(one, other) for one, other in zip(written, known, strict=False)]
    return known
