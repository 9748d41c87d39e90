"""docker-compose.yml, Dockerfile and .env.example, as far as they can be judged without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    image = SERVICES[name]["image"]
    assert re.fullmatch(r"[a-z0-9./-]+:\d[\w.-]*", image), image


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_that_stays_has_a_health_check(name: str) -> None:
    if SERVICES[name]["restart"] == "unless-stopped":
        assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


def test_every_dependency_exists_and_its_condition_can_come_true() -> None:
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
            else:
                assert wanted["condition"] == "service_completed_successfully"
                assert SERVICES[other]["restart"] != "unless-stopped", (name, other)


def test_every_named_volume_is_declared_and_used() -> None:
    used = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])


def test_ports_are_published_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_secret_stands_in_the_file_and_a_missing_one_stops_the_start() -> None:
    secrets = [
        str(value)
        for service in SERVICES.values()
        for key, value in service.get("environment", {}).items()
        if re.search("PASSWORD|SECRET|CREDENTIAL|ACCESS_KEY|IDENTITY|CATALOG", key)
    ]
    assert len(secrets) > 6
    assert all(re.search(r"\$\{[A-Z_]+:\?", value) for value in secrets), secrets


def test_the_example_names_every_required_variable_without_a_value() -> None:
    required = set(re.findall(r"\$\{([A-Z_0-9]+):\?", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if line and not line.startswith("#")} == {f"{name}=" for name in required}


def test_the_variables_of_the_environment_are_those_that_the_configuration_reads() -> None:
    read = set(re.findall(r"\$\{([A-Z_0-9]+)", (ROOT / "conf" / "anabranch.yaml").read_text(encoding="utf-8")))
    for name in OURS:
        given = {key for key in SERVICES[name]["environment"] if not key.startswith("AIRFLOW")}
        assert given == read, name


def test_every_command_of_ours_exists() -> None:
    from anabranch.cli import main

    lines = [SERVICES[name]["command"] for name in OURS]
    lines += [SERVICES[name]["healthcheck"]["test"][1:] for name in OURS if "healthcheck" in SERVICES[name]]
    ours = [line for line in lines if line[0] == "anabranch"]
    assert len(ours) == 3
    for line in ours:
        command = main.commands[line[1]]
        arguments = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in line[2:]]
        command.make_context(line[1], arguments)


def test_the_image_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
