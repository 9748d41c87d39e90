"""An Airflow of its own, and runs of `dag.test()` of the hourly DAGs in a process of their own."""

import os
import sys
from pathlib import Path

from programs import ROOT, output_of

DAGS = ROOT / "dags"

_SCRIPT = """
import importlib.util, sys
from datetime import datetime
dag_file, dag_id, at = sys.argv[1:]
sys.path.insert(0, dag_file.rpartition("/")[0])
spec = importlib.util.spec_from_file_location("anabranch_hourly", dag_file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
run = getattr(module, dag_id).test(logical_date=datetime.fromisoformat(at))
print("STATES", str(run.state), {t.task_id: str(t.state) for t in run.get_task_instances()})
"""


def new_airflow(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of an Airflow with a database of its own."""
    environment = os.environ | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "ANABRANCH_COMMAND": f"{sys.executable} -m anabranch.cli",
        **more,
    }
    home.mkdir()
    output_of(sys.executable, "-m", "airflow", "db", "migrate", env=environment, cwd=home)
    return environment


def run_hourly(stream: str, at: str, environment: dict[str, str]) -> str:
    """Run a stream's DAG, named by the end of its interval; return its output, the states last."""
    command = [sys.executable, "-c", _SCRIPT, DAGS / "anabranch_hourly.py"]
    command += [f"anabranch_hourly__{stream}", at]
    return output_of(*command, env=environment, seconds=400)
