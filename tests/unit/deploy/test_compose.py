"""docker-compose.yml, Dockerfile, .env.example and mounts as text; tests/deploy runs them."""

import base64
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.cli import docs, main
from anabranch.spark.java import spark_home

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILES = [ROOT / "Dockerfile", ROOT / "anabranch" / "starter_files" / "Dockerfile"]
IMAGE = re.compile(r"\$\{ANABRANCH_IMAGE:-(.*)\}")
OURS = [name for name, service in SERVICES.items() if IMAGE.fullmatch(service["image"])]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_pinned_checked_bounded_and_without_rights(name: str) -> None:
    image = IMAGE.sub(r"\1", SERVICES[name]["image"])
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d[\w.-]*", image), image
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    # Kafka's image writes its configuration when it starts.
    assert service.get("read_only", False) is not service["image"].startswith("apache/kafka:")
    if SERVICES[name]["restart"] == "unless-stopped":
        assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


def test_one_service_builds_our_image_with_the_ivy_of_pyspark() -> None:
    assert [name for name in SERVICES if "build" in SERVICES[name]] == ["image"]
    waits = {"condition": "service_completed_successfully"}
    for name in (name for name in OURS if name != "image"):
        assert SERVICES[name]["depends_on"]["image"] == waits, name
        assert SERVICES[name]["pull_policy"] == "never"
    text = DOCKERFILES[0].read_text(encoding="utf-8")
    source = re.search(r"/site-packages/(\S+/ivy-[\d.]+\.jar)", text)
    assert source is not None and (spark_home().parent / source[1]).is_file()


def test_the_check_of_the_speed_layer_reads_the_file_that_its_job_writes() -> None:
    speed = SERVICES["speed"]
    file = speed["command"][speed["command"].index("--health") + 1]
    assert speed["healthcheck"]["test"] == ["CMD", "anabranch", "health", file]
    # In memory it would not outlive a restart of the container.
    assert speed["volumes"] == [str(Path(file).parent)] and not speed["tmpfs"]


def test_the_environment_file_is_new_and_ignored_by_git(tmp_path: Path) -> None:
    """`sh deploy/dotenv.sh`, in a checkout and in a new user's folder."""
    docs.write(tmp_path)
    script = ["sh", str(tmp_path / "deploy" / "dotenv.sh")]
    subprocess.run(script, check=True, capture_output=True)
    file = tmp_path / ".env"
    assert file.stat().st_mode & 0o777 == 0o600
    lines = file.read_text(encoding="utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    example = (tmp_path / ".env.example").read_text(encoding="utf-8")
    assert set(values) == set(re.findall(r"^([A-Z_]+)=$", example, re.MULTILINE))
    assert len(set(values.values())) == len(values)
    assert all(len(value) >= 44 for value in values.values())
    assert len(base64.urlsafe_b64decode(values["AIRFLOW_FERNET_KEY"])) == 32
    again = subprocess.run(script, capture_output=True, text=True)
    assert again.returncode == 2 and "expected no .env" in again.stderr
    assert lines == file.read_text(encoding="utf-8").splitlines()
    for folder in (ROOT, tmp_path):
        assert ".env" in (folder / ".gitignore").read_text(encoding="utf-8").splitlines()


def _volumes() -> list[str]:
    return [volume for service in SERVICES.values() for volume in service.get("volumes", [])]


def test_every_volume_is_declared_and_every_dependency_can_come_true() -> None:
    used = {volume.partition(":")[0] for volume in _volumes() if not volume.startswith((".", "/"))}
    assert used == set(COMPOSE["volumes"])
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
            else:
                assert wanted["condition"] == "service_completed_successfully"
                assert SERVICES[other]["restart"] != "unless-stopped", (name, other)


def test_mounted_files_exist_are_read_only_and_are_in_a_new_users_folder(tmp_path: Path) -> None:
    mounted = [volume.split(":") for volume in _volumes() if volume.startswith(".")]
    assert len(mounted) == 4
    docs.write(tmp_path)
    for source, _, mode in mounted:
        assert mode == "ro"
        files = {file.relative_to(ROOT) for file in (ROOT / source).rglob("*") if file.is_file()}
        assert files
        for file in files:
            assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes()


def test_no_port_is_published_to_others_or_the_default_of_a_command() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    of_services = [str(service.get("ports")) for service in SERVICES.values()]
    published = {port for some in of_services for port in re.findall(r":-(\d+)\}", some)}
    options = [option for command in main.commands.values() for option in command.params]
    defaults = {str(option.default) for option in options if option.name == "port"}
    assert defaults and not published & defaults


def test_no_secret_is_in_the_file_and_the_example_names_each() -> None:
    secret = re.compile("PASSWORD$|SECRET|CREDENTIAL|ACCESS_KEY|IDENTITY|CATALOG|FERNET|_CONN$")
    given = [service.get("environment", {}).items() for service in SERVICES.values()]
    secrets = [str(value) for some in given for key, value in some if secret.search(key)]
    assert len(secrets) > 30
    assert all(re.search(r"\$\{[A-Z_]+:\?", value) for value in secrets), secrets
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    required = {f"{name}=" for name in re.findall(r"\$\{([A-Z_0-9]+):\?", text)}
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if line and not line.startswith("#")} == required


def test_the_variables_of_the_environment_are_those_that_the_configuration_reads() -> None:
    conf = (ROOT / "conf" / "anabranch.yaml").read_text(encoding="utf-8")
    # Airflow's own are of its services alone, and say there where its logs are.
    named = re.findall(r"\$\{([A-Z_0-9]+)", conf)
    read = {name for name in named if not name.startswith("AIRFLOW")}
    for name in (name for name in OURS if name != "image"):
        keys = SERVICES[name].get("environment", {})
        given = {key for key in keys if not key.startswith("AIRFLOW")}
        # Spark's own processes need no way to the lake, since each job brings its own.
        of_spark = {"SPARK_WORKER_OPTS", "SPARK_DAEMON_MEMORY"} & given
        assert given == (of_spark if name.startswith("spark-") else read), name


def test_every_command_of_ours_exists() -> None:
    checked = [SERVICES[name] for name in OURS if "healthcheck" in SERVICES[name]]
    lines = [SERVICES[name]["command"] for name in OURS]
    lines += [service["healthcheck"]["test"][1:] for service in checked]
    ours = [line for line in lines if line[0] == "anabranch"]
    run = ["apply", "health", "health", "page", "speed", "speed"]
    assert sorted(line[1] for line in ours) == run
    for line in ours:
        command = main.commands[line[1]]
        arguments = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in line[2:]]
        command.make_context(line[1], arguments)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_the_image_runs_as_a_user_that_owns_the_folders_of_the_volumes_alone(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    sources = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(sources) == {"python:3.11.14-slim-bookworm", "base"}
    made = re.search(r"mkdir -p (.*) \\\n    && chown -R anabranch: (.*)\n", text)
    assert made is not None and made[2] == "/var/lib/anabranch" and "--chown" not in text
    volumes = [volume for name in OURS for volume in SERVICES[name].get("volumes", [])]
    targets = {volume.split(":")[1] for volume in volumes if ":" in volume}
    assert targets and targets <= set(made[1].split())


def test_the_images_have_the_version_and_the_uv_of_the_checkout() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = DOCKERFILES[1].read_text(encoding="utf-8")
    argument = re.search(r'^ARG ANABRANCH="anabranch\[(.*)\]==(.*)"$', text, re.MULTILINE)
    assert argument is not None and argument[2] == project["version"]
    extras = re.findall(r"--extra (\w+)", DOCKERFILES[0].read_text(encoding="utf-8"))
    assert argument[1].split(",") == extras
    image = f"${{ANABRANCH_IMAGE:-anabranch:{project['version']}}}"
    assert {SERVICES[name]["image"] for name in OURS} == {image}
    bootstrap = (ROOT / "scripts" / "bootstrap").read_text(encoding="utf-8")
    pinned = re.search(r"^UV=uv==(\S+)$", bootstrap, re.MULTILINE)
    assert pinned is not None
    for file in DOCKERFILES:
        assert f"pip install --no-cache-dir uv=={pinned[1]}\n" in file.read_text(encoding="utf-8")


def test_a_new_users_image_has_the_packages_of_the_lock() -> None:
    export = "export --frozen --no-dev --all-extras --no-hashes --no-emit-project --no-annotate"
    done = subprocess.run(
        [Path(sys.executable).with_name("uv"), *export.split(), "--no-header"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    written = (ROOT / "deploy" / "constraints.txt").read_text(encoding="utf-8")
    expected = f"# Written by: uv {export}\n{done.stdout}"
    assert written == expected, "run the command in its first line, after a change of uv.lock"
