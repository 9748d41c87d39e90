"""Imports of commands that need no Spark: they take most of the time of a short command."""

import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pyarrow
import pyiceberg
import pytest
import sqlalchemy

from anabranch.spark import worker_daemon

LARGE = {"great_expectations", "pandas"}
# Of the extras: an environment may lack them.
EXTRAS = {
    "airflow", "deltalake", "fastavro", "grpc_tools", "jinja2", "openlineage", "psycopg2",
    "starlette", "uvicorn",
}  # fmt: skip
LAKE = {"pyspark", "boto3", "duckdb", "sqlglot", *LARGE}
# Modules, and packages that are not imported with them and with those before them.
IN_TURN = [
    ("anabranch.cli", LAKE | {"pyiceberg", "pyarrow", "kafka", "pydantic"}),
    (
        "anabranch.cli.dev",
        LAKE | {"psutil", "kafka", "pyarrow", "anabranch.dev.services", "anabranch.dev.producers"},
    ),
    ("anabranch.spark.submit, anabranch.iceberg.catalog_settings", LAKE | {"pyiceberg", "pyarrow"}),
    ("anabranch.job, anabranch.operations.reports.status, anabranch.protocol.decisions", LAKE | {"rich.console"}),
    ("batch_layer.job, speed_layer.job", LARGE | EXTRAS),
    (f"pyspark.daemon, {', '.join(worker_daemon.MODULES)}", LARGE),
]  # fmt: skip
# Imports PyArrow's datasets by PyIceberg before anything else of the table.
MAINTAIN = [("anabranch.lifecycle.maintenance", LAKE - {"sqlglot"})]


def printed(code: str) -> list[str]:
    """The lines that a process prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


@pytest.mark.parametrize("steps", [IN_TURN, MAINTAIN], ids=["in turn", "maintain"])
def test_a_process_imports_only_what_it_uses(steps: list[tuple[str, set[str]]]) -> None:
    code = "import sys; from anabranch.common import process; process.import_pandas_late()\n"
    for modules, unwanted in steps:
        code += f"import {modules}\nprint('{modules}:', sorted({unwanted} & set(sys.modules)))\n"
    assert printed(code) == [f"{modules}: []" for modules, _ in steps]


def test_importing_the_package_leaves_imports_as_they_are_and_pandas_for_later() -> None:
    ours = "[f for f in sys.meta_path if type(f).__module__.startswith('anabranch')]"
    assert printed(f"import sys, anabranch; anabranch.open; print({ours})") == ["[]"]
    code = (
        "from anabranch.common import process; process.import_pandas_late(); import "
        "anabranch.iceberg.lake, pyarrow as pa; frame = pa.table({'a': [1, 2]}).to_pandas(); "
        "import pandas; print(frame['a'].sum(), pa.array(pandas.Series([1.0, None])).null_count)"
    )
    assert printed(code) == ["3 1"]


def test_packages_are_compiled_for_commands_that_may_not_write() -> None:
    modules = (pyiceberg, pyarrow, sqlalchemy)
    compiled = [Path(cache_from_source(module.__file__)) for module in modules]
    assert [str(path) for path in compiled if not path.exists()] == []
