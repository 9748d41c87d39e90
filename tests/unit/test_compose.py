"""docker-compose.yml, Dockerfile, .env.example and what is mounted, by their text; tests/deploy runs what they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.cli import starter

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILES = [ROOT / "Dockerfile", ROOT / "anabranch" / "starter_files" / "Dockerfile"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    image = SERVICES[name]["image"]
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d[\w.-]*", image), image


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


def _volumes() -> list[str]:
    return [volume for service in SERVICES.values() for volume in service.get("volumes", [])]


def test_every_named_volume_is_declared_and_used() -> None:
    used = {volume.partition(":")[0] for volume in _volumes() if not volume.startswith(".")}
    assert used == set(COMPOSE["volumes"])


def test_what_is_mounted_is_there_cannot_be_written_and_is_in_a_new_users_folder(tmp_path: Path) -> None:
    mounted = [volume.split(":") for volume in _volumes() if volume.startswith(".")]
    assert len(mounted) == 4
    starter.write(tmp_path)
    for source, _, mode in mounted:
        assert mode == "ro"
        files = {file.relative_to(ROOT) for file in (ROOT / source).rglob("*") if file.is_file()}
        assert files
        for file in files:
            assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes()


def test_ports_are_published_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_secret_stands_in_the_file_and_a_missing_one_stops_the_start() -> None:
    secrets = [
        str(value)
        for service in SERVICES.values()
        for key, value in service.get("environment", {}).items()
        if re.search("PASSWORD$|SECRET|CREDENTIAL|ACCESS_KEY|IDENTITY|CATALOG|FERNET|_CONN$", key)
    ]
    assert len(secrets) > 30
    assert all(re.search(r"\$\{[A-Z_]+:\?", value) for value in secrets), secrets


def test_the_example_names_every_required_variable_without_a_value() -> None:
    required = set(re.findall(r"\$\{([A-Z_0-9]+):\?", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if line and not line.startswith("#")} == {f"{name}=" for name in required}


def test_the_variables_of_the_environment_are_those_that_the_configuration_reads() -> None:
    conf = (ROOT / "conf" / "anabranch.yaml").read_text(encoding="utf-8")
    # Airflow's own are of its services alone, and say there where its logs are.
    read = {name for name in re.findall(r"\$\{([A-Z_0-9]+)", conf) if not name.startswith("AIRFLOW")}
    for name in OURS:
        given = {key for key in SERVICES[name].get("environment", {}) if not key.startswith("AIRFLOW")}
        # Spark's own processes need no way to the lake, since each job brings its own.
        assert given == ({"SPARK_WORKER_OPTS"} & given if name.startswith("spark-") else read), name


def test_every_command_of_ours_exists() -> None:
    from anabranch.cli import main

    lines = [SERVICES[name]["command"] for name in OURS]
    lines += [SERVICES[name]["healthcheck"]["test"][1:] for name in OURS if "healthcheck" in SERVICES[name]]
    ours = [line for line in lines if line[0] == "anabranch"]
    assert len(ours) == 4
    for line in ours:
        command = main.commands[line[1]]
        arguments = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in line[2:]]
        command.make_context(line[1], arguments)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_the_image_runs_as_a_user_of_its_own_and_says_what_it_is_made_from(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    users = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert users == ["10001:10001"]
    assert re.findall(r"^FROM (.*)$", text, re.MULTILINE) == ["python:3.11.14-slim-bookworm"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_the_image_has_the_folders_of_its_volumes_so_that_its_user_owns_them(file: Path) -> None:
    targets = {volume.split(":")[1] for name in OURS for volume in SERVICES[name].get("volumes", [])}
    made = re.search(r"mkdir -p (.*) \\\n    && chown -R anabranch: (.*)\n", file.read_text(encoding="utf-8"))
    assert made is not None
    assert targets and targets <= set(made[1].split())
    assert all(any(target.startswith(owned) for owned in made[2].split()) for target in targets)


def test_a_new_users_image_has_the_version_that_wrote_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f'ARG ANABRANCH="anabranch[airflow,lineage]=={project["version"]}"' in DOCKERFILES[1].read_text(
        encoding="utf-8"
    )
    assert all(SERVICES[name]["image"] == f"anabranch:{project['version']}" for name in OURS)


def test_the_images_have_the_uv_that_the_checkout_is_made_with() -> None:
    pinned = re.search(r"^UV=uv==(\S+)$", (ROOT / "scripts" / "bootstrap").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for file in DOCKERFILES:
        assert f"pip install --no-cache-dir uv=={pinned[1]}\n" in file.read_text(encoding="utf-8")
