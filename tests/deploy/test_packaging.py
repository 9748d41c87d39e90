"""The wheel and the source distribution: built, installed elsewhere, and used from there."""

import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import tutorial_page
from installation import UV, install, run
from servers import free_ports


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel and one source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and what it asks for, not the checkout."""
    [wheel] = built.glob("*.whl")
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


def test_both_contain_the_code_the_configuration_and_the_dags(built: Path) -> None:
    [wheel], [source] = built.glob("*.whl"), built.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "anabranch/cli/__init__.py", "speed_layer/job.py", "batch_layer/job.py",
        "anabranch/protocol/merge.py", "anabranch/lineage/AnabranchHourRunFacet.json",
        "anabranch/operations/page/templates/streams.html",
        "anabranch/operations/page/static/page.css", "anabranch/_conf/jvm/ivy.xml",
        "anabranch/_conf/jvm/jars.sha256", "anabranch/_conf/anabranch.yaml",
        "anabranch/_dags/anabranch_hourly.py", "anabranch/_dags/anabranch_conf.py",
        "anabranch/_deploy/docker-compose.yml", "anabranch/starter_files/Dockerfile",
        "anabranch/starter_files/gitignore", "anabranch/_deploy/deploy/constraints.txt",
        "anabranch/_deploy/deploy/dotenv.sh", "anabranch/_deploy/deploy/kubernetes/speed.yaml",
        "anabranch/_deploy/deploy/prometheus/alerts.yml",
    } <= in_wheel  # fmt: skip
    assert not [name for name in in_wheel if name.startswith("tests/") or "__pycache__" in name]
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml", "README.md", "LICENSE", "NOTICE", "tests/support/world.py",
        "conf/jvm/ivy.xml",
    } <= names  # fmt: skip


def test_the_installed_command_has_no_heavy_imports(installed: Path, tmp_path: Path) -> None:
    shown = run(installed / "anabranch", "--help", cwd=tmp_path)
    assert "Kafka to one exact Iceberg table" in shown
    result = subprocess.run(
        [installed / "python", "-X", "importtime", "-m", "anabranch.cli", "--help"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "click" in imported
    assert not imported & {
        "pyspark", "pyiceberg", "pyarrow", "boto3", "kafka", "duckdb", "great_expectations",
        "pydantic",
    }  # fmt: skip


def test_init_writes_a_folder_and_overwrites_nothing(installed: Path, tmp_path: Path) -> None:
    run(installed / "anabranch", "init", "mine", cwd=tmp_path)
    files = [file for file in (tmp_path / "mine").rglob("*") if file.is_file()]
    places = {str(file.relative_to(tmp_path / "mine")) for file in files}
    assert {
        "conf/anabranch.yaml", "conf/streams/game_events.yaml", "dags/anabranch_hourly.py",
        "dags/anabranch_conf.py", "docker-compose.yml", "README.md", "Dockerfile", ".dockerignore",
        ".gitignore", ".env.example", "deploy/dotenv.sh", "deploy/kubernetes/speed.yaml",
        "deploy/prometheus/alerts.yml", "deploy/postgres/airflow.sql",
        "deploy/grafana/dashboards/anabranch.json",
    } <= places  # fmt: skip
    loaded = run(
        installed / "python", "-c",
        "from anabranch import config; config.load_environment('mine/conf'); "
        "print(config.load_stream('game_events', 'mine/conf').topic)",
        cwd=tmp_path,
    )  # fmt: skip
    assert loaded == "game_events\n"
    again = subprocess.run(
        [installed / "anabranch", "init", "mine"], cwd=tmp_path, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert again.returncode == 2
    assert "expected none of its files" in again.stderr


def test_the_documentation_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    pages = run(installed / "anabranch", "docs", cwd=tmp_path)
    assert "formats" in pages and str(tmp_path) not in pages
    page = run(installed / "anabranch", "docs", "docs/reference/formats.md", cwd=tmp_path)
    assert page.startswith("# ")


@pytest.mark.timeout(1200)
def test_the_tutorial_runs_at_the_lowest_versions(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    installed = install(wheel, tmp_path / "venv", "[airflow]", "lowest-direct")
    asked = "from importlib.metadata import version as v; print(v('pyspark'), v('apache-airflow'))"
    spark, airflow = run(installed / "python", "-c", asked).split()
    assert (spark[:4], airflow) == ("4.0.", "3.3.0")
    tutorial_page.follow(installed, tmp_path)


def test_the_commands_of_the_new_readme_run_in_order(built: Path, tmp_path: Path) -> None:
    """As a new user types them, from the wheel alone, its newest dependencies, and free ports."""
    [wheel] = built.glob("*.whl")
    installed = install(wheel, tmp_path / "venv", "[airflow]")
    folder = tmp_path / "mine"
    run(installed / "anabranch", "init", folder)
    [copied] = (folder / "wheels").glob("*.whl")
    assert copied.read_bytes() == wheel.read_bytes()
    readme = (folder / "README.md").read_text("utf-8")
    [block] = re.findall(r"## Try it\n\n```sh\n(.*?)```", readme, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
    lines.remove("anabranch page")  # until Ctrl-C, and it needs the extra `page`
    kafka, s3 = free_ports(2)
    assert lines[0] == "anabranch dev up" and lines[-1] == "anabranch dev down"
    lines[0] += f" --kafka-port {kafka} --s3-port {s3}"
    environment = os.environ | {
        "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}",
        "ANABRANCH_KAFKA": f"127.0.0.1:{kafka}", "ANABRANCH_S3": f"http://127.0.0.1:{s3}",
    }  # fmt: skip
    printed: dict[str, str] = {}
    try:
        for line in lines:
            # The first commands after an installation also compile what they import.
            for _ in range(5):
                done = subprocess.run(
                    line, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
                    timeout=300,
                )  # fmt: skip
                if "the same command with a larger --limit" not in done.stdout:
                    break
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            printed[line] = done.stdout
    finally:
        subprocess.run(
            [installed / "anabranch", "dev", "down"], cwd=folder, env=environment, check=True,
            timeout=60,
        )  # fmt: skip
    assert "ready; next: anabranch apply" in printed["anabranch doctor"]
    [query] = [line for line in lines if line.startswith("anabranch query")]
    counts = [int(row.split()[-1]) for row in printed[query].splitlines()[2:]]
    assert sum(counts) == 3000
