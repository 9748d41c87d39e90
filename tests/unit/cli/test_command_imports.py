"""Imports of commands that need no Spark: they take most of the time of a short command."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pyarrow
import pyiceberg
import pytest
import sqlalchemy

from anabranch.spark import worker_daemon


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "anabranch.cli",
            {"pyspark", "pyiceberg", "pyarrow", "kafka", "boto3", "pandas", "pydantic", "sqlglot"},
        ),
        (
            "anabranch.cli.dev",
            {
                "psutil",
                "kafka",
                "boto3",
                "pyspark",
                "pyarrow",
                "anabranch.dev.services",
                "anabranch.dev.producers",
            },
        ),
        (
            "anabranch.spark.submit, anabranch.iceberg.catalog_settings",
            {"pyspark", "pyiceberg", "pyarrow", "pandas"},
        ),
        (
            "anabranch.cli, anabranch.job, anabranch.operations.reports.status, "
            "anabranch.protocol.decisions",
            {
                "pyspark",
                "boto3",
                "duckdb",
                "sqlglot",
                "great_expectations",
                "pandas",
                "rich.console",
            },
        ),
        # Imports PyArrow's datasets by PyIceberg before anything else of the table.
        (
            "anabranch.lifecycle.maintenance",
            {"pyspark", "boto3", "duckdb", "great_expectations", "pandas"},
        ),
        ("batch_layer.job, speed_layer.job", {"great_expectations", "pandas"}),
        (f"pyspark.daemon, {', '.join(worker_daemon.MODULES)}", {"great_expectations", "pandas"}),
    ],
    ids=["help", "dev", "submit", "status", "maintain", "jobs", "workers"],
)
def test_a_command_imports_only_the_packages_that_it_uses(modules: str, unwanted: set[str]) -> None:
    as_a_command = "from anabranch.common import process; process.import_pandas_late()"
    code = f"{as_a_command}; import sys, {modules}; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_package_leaves_the_imports_of_a_program_as_they_are() -> None:
    code = (
        "import sys, anabranch; anabranch.open; "
        "print([f for f in sys.meta_path if type(f).__module__.startswith('anabranch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_pandas_can_be_imported_later() -> None:
    code = (
        "from anabranch.common import process; process.import_pandas_late(); import "
        "anabranch.iceberg.lake, pyarrow as pa; frame = pa.table({'a': [1, 2]}).to_pandas(); "
        "import pandas; print(frame['a'].sum(), pa.array(pandas.Series([1.0, None])).null_count)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["3", "1"]


def test_packages_are_compiled_for_commands_that_may_not_write() -> None:
    compiled = [
        Path(cache_from_source(module.__file__)) for module in (pyiceberg, pyarrow, sqlalchemy)
    ]
    assert [str(path) for path in compiled if not path.exists()] == []
