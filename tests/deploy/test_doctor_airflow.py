"""The doctor's findings on a real Airflow: each is caused, and its printed remedy clears it."""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from programs import output_of
from run_books import printed
from servers import serving

from anabranch.common.errors import ConfigurationError
from anabranch.config import load_stream
from anabranch.operations.doctor import airflow
from anabranch.operations.finding import Finding, Issue

ROOT = Path(__file__).resolve().parents[2]
STREAM = "game_events"
run = partial(output_of, shell=True)


@pytest.fixture
def dags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The DAG files of an Airflow without a database yet."""
    home = tmp_path / "airflow"
    shutil.copytree(ROOT / "dags", home / "dags")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "airflow").write_text(f'#!/bin/sh\nexec {sys.executable} -m airflow "$@"\n')
    (bin_folder / "airflow").chmod(0o755)
    for name, value in {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "ANABRANCH_CONF": str(ROOT / "conf"),
    }.items():
        monkeypatch.setenv(name, value)
    return home / "dags"


def found() -> dict[Issue, Finding]:
    found = airflow.findings([load_stream(STREAM, ROOT / "conf")], airflow.read())
    return {finding.check: finding for finding in found}


def test_airflows_problems_are_found_and_their_remedies_work(dags: Path, tmp_path: Path) -> None:
    assert airflow.is_configured()
    with pytest.raises(ConfigurationError, match="expected a list") as away:
        airflow.read()
    assert airflow.failed(str(away.value)).remedy == printed("airflow db migrate")
    run(printed("airflow db migrate"))

    assert (nothing := found()).keys() == {Issue.AIRFLOW_SCHEDULER, Issue.AIRFLOW_DAG_MISSING}
    assert nothing[Issue.AIRFLOW_DAG_MISSING].remedy == printed("airflow dags reserialize")
    run(printed("airflow dags reserialize"))

    (dags / "odd.py").write_text("# a dag of airflow\nraise ValueError('no such stream')\n")
    run("airflow dag-processor --num-runs 1")
    run("airflow pools set default_pool 0 none")
    wrong = found()
    assert wrong.keys() == {
        Issue.AIRFLOW_SCHEDULER, Issue.AIRFLOW_IMPORT, Issue.AIRFLOW_PAUSED, Issue.AIRFLOW_POOL,
    }  # fmt: skip
    assert wrong[Issue.AIRFLOW_IMPORT].subject.endswith("odd.py")
    assert wrong[Issue.AIRFLOW_IMPORT].found == "ValueError: no such stream"
    assert wrong[Issue.AIRFLOW_IMPORT].remedy == printed("airflow dags list-import-errors")
    assert "no such stream" in run(wrong[Issue.AIRFLOW_IMPORT].remedy, expect=1)
    (dags / "odd.py").unlink()
    run("airflow dag-processor --num-runs 1")
    pool = printed("airflow pools set default_pool 128 'Default pool'")
    assert wrong[Issue.AIRFLOW_POOL].remedy == pool
    run(wrong[Issue.AIRFLOW_POOL].remedy)
    assert wrong[Issue.AIRFLOW_SCHEDULER].remedy == printed("airflow scheduler")
    # This runs before the DAGs, so the scheduler has nothing to work on.
    scheduler = wrong[Issue.AIRFLOW_SCHEDULER].remedy.split()
    with serving(scheduler, tmp_path / "scheduler.log", is_alive, 90):
        assert found().keys() == {Issue.AIRFLOW_PAUSED}
    assert wrong[Issue.AIRFLOW_PAUSED].remedy == printed(
        "airflow dags unpause --yes --treat-dag-id-as-regex '^anabranch_.+__(STREAM)$'",
        STREAM=STREAM,
    )
    run(wrong[Issue.AIRFLOW_PAUSED].remedy)
    assert not found().keys() - {Issue.AIRFLOW_SCHEDULER}


def is_alive() -> bool:
    return airflow.read().is_scheduled
