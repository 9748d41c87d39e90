"""Contents of the archive of packages for executors."""

import pytest

from speed_layer.pack import _name_of, needed


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("click<9,>=7", "click"),
        ("python-dateutil>=2.8.2", "python-dateutil"),
        ("ruamel.yaml (>=0.17)", "ruamel.yaml"),
        ("pywin32; sys_platform == 'win32'", "pywin32"),
        ("six", "six"),
    ],
)
def test_the_name_of_a_requirement(requirement: str, name: str) -> None:
    assert _name_of(requirement) == name


def test_packages_that_workers_import_are_packed_with_their_requirements() -> None:
    names = {one.metadata["Name"].lower() for one in needed()}
    # DuckDB hashes keys and rows in tasks.
    assert {"duckdb", "numpy", "pyarrow", "pyiceberg", "pyspark", "py4j", "pydantic"} <= names
    # A requirement of pydantic.
    assert "annotated-types" in names
    assert not {"anabranch", "great-expectations", "apache-airflow"} & names
