"""Run all tests in shards; `make test-full SHARD=3/8` runs `python tests/support/full_run.py
--shard 3/8`.

    python tests/support/full_run.py                    every shard, one after the other
    python tests/support/full_run.py --shard 3/8        one of eight
    python tests/support/full_run.py --only deploy      the files whose path contains this text
    python tests/support/full_run.py --plan 8           what each of eight shards runs, how long
    python tests/support/full_run.py --status           which suites passed last at which commit
    python tests/support/full_run.py --merge A B        merge the records of other machines

A suite is a folder of tests. The Makefile's target of a suite names its extra packages with `uv run
--with`. Shards are balanced by the durations in tests/durations.json, in seconds; `--durations
FILE` writes those of this run to FILE. Passed shards and files are recorded in .test-full.json,
which git ignores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
RECORD = ROOT / ".test-full.json"

TEST_FOLDERS = ("unit", "model", "integration")
"""The folders that `make test` runs, except tests marked `full`; here they run in two processes."""

SHARDS = 14
_UNKNOWN_SECONDS = 60.0
_UNKNOWN_SECONDS_OF_UNIT = 3.0
# The tests of a file that takes longer are distributed one by one.
_SPLIT_SECONDS = 400.0
# Two processes on two cores take this fraction of the total duration of their tests.
_TWO_PROCESSES = 0.6


def suite_of(name: str) -> str:
    """Return the suite of a test file by its path below the root: `unit`, `failures`,
    `external/search`."""
    parts = Path(name).parts
    return "/".join(parts[1:3]) if parts[1] == "external" else parts[1]


@dataclass(frozen=True)
class Unit:
    """The smallest part of a shard: a test file, or one test of a long file."""

    name: str
    seconds: float

    @property
    def suite(self) -> str:
        return suite_of(self.name)


def suites(root: Path = ROOT) -> list[str]:
    """Return the suites: the folders with test files."""
    return sorted(
        {suite_of(str(file.relative_to(root))) for file in root.glob("tests/**/test_*.py")}
    )


def packages(suite: str, makefile: str | None = None) -> list[str]:
    """Return the packages that the suite's target in the Makefile adds to the environment. Raises
    SystemExit if there is no target."""
    text = makefile if makefile is not None else (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in text.splitlines():
        if re.search(rf"pytest\b.* tests/{suite}(\s|$)", line):
            return [name.strip("'") for name in re.findall(r"--with (\S+)", line)]
    raise SystemExit(f"Makefile: expected a target that runs tests/{suite}, found none; add one")


def command(suite: str, *arguments: str) -> list[str]:
    """Return the pytest command of a suite, with its extra packages."""
    bin_folder = Path(sys.executable).parent
    added = packages(suite)
    if not added:
        return [sys.executable, "-m", "pytest", *arguments]
    with_added = [word for name in added for word in ("--with", name)]
    return [
        str(bin_folder / "uv"),
        "run",
        "--no-sync",
        *with_added,
        "python",
        "-m",
        "pytest",
        *arguments,
    ]


def load_durations() -> dict[str, dict[str, float]]:
    """Return seconds by file and test; the test "" has the sum of the file's short tests."""
    loaded: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return loaded


def plan_units(
    files: Iterable[str],
    durations: Mapping[str, Mapping[str, float]],
    tests: Mapping[str, Sequence[str]],
) -> list[Unit]:
    """Return files, and the tests of long files, with their expected seconds."""
    units = []
    for file in files:
        known = durations.get(file, {})
        suite = suite_of(file)
        part = _TWO_PROCESSES if suite in TEST_FOLDERS else 1.0
        unknown = _UNKNOWN_SECONDS_OF_UNIT if suite == "unit" else _UNKNOWN_SECONDS
        total = (sum(known.values()) if known else unknown) * part
        if total <= _SPLIT_SECONDS or file not in tests:
            units.append(Unit(file, total))
            continue
        short = [test for test in tests[file] if test not in known]
        share = known.get("", 0.0) / max(1, len(short))
        units += [Unit(f"{file}::{test}", known.get(test, share) * part) for test in tests[file]]
    return units


def plan_shards(units: Iterable[Unit], count: int) -> list[list[Unit]]:
    """Distribute units over shards: the longest first, each into the shortest shard."""
    shards: list[list[Unit]] = [[] for _ in range(count)]
    seconds = [0.0] * count
    for unit in sorted(units, key=lambda one: (-one.seconds, one.name)):
        least = min(range(count), key=lambda i: (seconds[i], i))
        shards[least].append(unit)
        seconds[least] += unit.seconds
    return [sorted(shard, key=lambda one: one.name) for shard in shards]


def collect(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the tests of files, with one run of pytest for each set of extra packages."""
    found: dict[str, list[str]] = {}
    by_packages: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in files:
        by_packages[tuple(packages(suite_of(file)))].append(file)
    for some in by_packages.values():
        # PYTEST_ADDOPTS is empty: options of the run may change the format of the list.
        listed = subprocess.run(
            command(
                suite_of(some[0]),
                "--collect-only",
                "-q",
                "-p",
                "no:cacheprovider",
                "--no-header",
                *some,
            ),
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTEST_ADDOPTS": ""},
        )
        if listed.returncode != 0:
            raise SystemExit(
                f"{', '.join(some)}: expected tests, found\n{listed.stdout}{listed.stderr}"
            )
        names = [line.split("::", 1) for line in listed.stdout.splitlines() if "::" in line]
        found |= {file: [test for of, test in names if of == file] for file in some}
    return found


def all_shards(count: int) -> list[list[Unit]]:
    durations = load_durations()
    files = [
        str(file.relative_to(ROOT))
        for suite in suites()
        for file in sorted((ROOT / "tests" / suite).glob("**/test_*.py"))
    ]
    long = [
        f for f in files if sum(durations.get(f, {}).values()) * _TWO_PROCESSES > _SPLIT_SECONDS
    ]
    return plan_shards(plan_units(files, durations, collect(long)), count)


def commit() -> str:
    """Return the tested commit, with a + if files differ from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True
    )
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def load_record() -> dict[str, dict[str, dict[str, str]]]:
    if not RECORD.exists():
        return {"shards": {}, "units": {}}
    loaded: dict[str, dict[str, dict[str, str]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return loaded


def merge(records: Iterable[Path]) -> None:
    """Merge records of other machines; the later pass counts."""
    record = load_record()
    for path in records:
        for kind, entries in json.loads(path.read_text(encoding="utf-8")).items():
            for name, passed in entries.items():
                if passed["at"] >= record[kind].get(name, {"at": ""})["at"]:
                    record[kind][name] = passed
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def record_shard(name: str, tested: str) -> None:
    """Record that a whole shard passed at a commit."""
    record = load_record()
    record["shards"][name] = {
        "commit": tested,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run_units(label: str, shard: Sequence[Unit], durations: dict[str, dict[str, float]]) -> bool:
    """Run units, suite by suite, and record those that passed. Return whether all passed."""
    by_suite: dict[str, list[Unit]] = defaultdict(list)
    for unit in shard:
        by_suite[unit.suite].append(unit)
    tested, passed, began = commit(), True, time.monotonic()
    for suite, units in by_suite.items():
        with tempfile.TemporaryDirectory(prefix="anabranch-full-") as folder:
            listed, recorded = Path(folder) / "tests", Path(folder) / "record.json"
            listed.write_text("\n".join(unit.name for unit in units) + "\n", encoding="utf-8")
            processes = (
                [
                    "-n",
                    "2",
                    "--dist",
                    "loadfile",
                    "--no-loadscope-reorder",
                    "--max-worker-restart",
                    "0",
                ]
                if suite in TEST_FOLDERS
                else []
            )
            print(f"{label}: suite {suite}: {len(units)} files or tests", flush=True)
            code = subprocess.run(
                command(suite, *processes, "--record", str(recorded), f"@{listed}"),
                cwd=ROOT, env={"SCALE_MICRO_BATCHES": "900"} | os.environ | {"TEST_BUDGET": "full"},
            ).returncode  # fmt: skip
            results = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
        passed = passed and code == 0
        add_durations(durations, results, {unit.name for unit in units})
        record, now = load_record(), datetime.now(UTC).isoformat(timespec="seconds")
        for name in passed_units(units, results, code):
            record["units"][name] = {"commit": tested, "at": now}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(
        f"{label}: {'passed' if passed else 'FAILED'} in {(time.monotonic() - began) / 60:.0f} "
        "minutes"
    )
    return passed


def passed_units(
    units: Iterable[Unit], results: Mapping[str, Mapping[str, Any]], code: int
) -> list[str]:
    """Return the names of the units whose tests all passed or were skipped, by the results of a
    recorded run and its exit code. After an interrupted run, only those of single tests: the other
    tests of a file may not have begun."""
    passed = []
    for unit in units:
        outcomes = {
            t["outcome"] for name, t in results.items() if f"{name}::".startswith(f"{unit.name}::")
        }
        is_whole = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or "::" in unit.name
        if is_whole and outcomes and outcomes <= {"passed", "skipped"}:
            passed.append(unit.name)
    return passed


def add_durations(
    durations: dict[str, dict[str, float]],
    results: Mapping[str, Mapping[str, Mapping[str, float]]],
    whole: Collection[str],
) -> None:
    """Replace the durations of files that ran `whole`; for other files, those of the tests that
    ran. Tests of less than a second are added up."""
    by_file: dict[str, dict[str, float]] = defaultdict(dict)
    for name, test in results.items():
        file, _, own = name.partition("::")
        by_file[file][own] = sum(test["seconds"].values())
    for file, tests in by_file.items():
        kept = {name: round(seconds, 1) for name, seconds in sorted(tests.items()) if seconds >= 1}
        if file in whole:
            durations[file] = kept | {"": round(sum(s for s in tests.values() if s < 1), 1)}
        else:
            durations[file] = durations.get(file, {}) | kept


def print_plan(shards: Sequence[Sequence[Unit]]) -> None:
    for i, shard in enumerate(shards, 1):
        by_suite: dict[str, float] = defaultdict(float)
        for unit in shard:
            by_suite[unit.suite] += unit.seconds
        of = ", ".join(f"{suite} {seconds / 60:.1f}" for suite, seconds in sorted(by_suite.items()))
        print(f"shard {i}/{len(shards)}: {sum(by_suite.values()) / 60:.0f} minutes: {of}")


def print_status() -> None:
    """Print the last commit at which each shard, and the files of each suite, passed."""
    record = load_record()
    for shard, passed in sorted(record["shards"].items(), key=lambda one: one[0].rjust(9)):
        print(f"shard {shard}: passed at {passed['commit']}, {passed['at']}")
    for suite in suites():
        at: dict[str, list[str]] = defaultdict(list)
        for file in sorted((ROOT / "tests" / suite).glob("**/test_*.py")):
            name = str(file.relative_to(ROOT))
            found = [
                p["commit"]
                for n, p in record["units"].items()
                if n == name or n.startswith(f"{name}::")
            ]
            for one in found or [""]:
                if file.name not in at[one]:
                    at[one].append(file.name)
        for one, files in at.items():
            some = ", ".join(files[:4]) + (", ..." if len(files) > 4 else "")
            of = f"{len(files)} of {sum(map(len, at.values()))} files ({some})"
            print(
                f"suite {suite}: {of} {f'passed last at {one}' if one else 'have not passed yet'}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shard", metavar="I/N")
    parser.add_argument("--only", metavar="TEXT")
    parser.add_argument("--plan", type=int, metavar="N")
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--durations", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.merge:
        merge(given.merge)
    if given.status or given.merge:
        print_status()
        return 0
    if given.plan:
        print_plan(all_shards(given.plan))
        return 0
    number, count = (int(n) for n in given.shard.split("/")) if given.shard else (0, SHARDS)
    if not 0 <= number <= count or (given.shard and number == 0):
        parser.error(f"--shard: expected I/N with I from 1 to N, found {given.shard}")
    shards, durations = all_shards(count), load_durations()
    passed = True
    if given.only:
        chosen = [unit for shard in shards for unit in shard if given.only in unit.name]
        if not chosen:
            parser.error(
                f"--only: expected a part of the path of a file of tests, found {given.only}"
            )
        passed = run_units(f"only {given.only}", chosen, durations)
    else:
        for i in [number] if number else range(1, count + 1):
            tested = commit()
            if run_units(f"shard {i}/{count}", shards[i - 1], durations):
                record_shard(f"{i}/{count}", tested)
            else:
                passed = False
    if given.durations:
        durations = {file: tests for file, tests in durations.items() if (ROOT / file).exists()}
        given.durations.write_text(
            json.dumps(durations, indent=0, sort_keys=True) + "\n", encoding="utf-8"
        )
    print_status()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
