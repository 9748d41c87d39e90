"""Tables of an earlier version: read, continued and maintained by this one, and the other way
round.

Each step is a process with the code of one version on one lake. The rows, dead letters, ledger and
state of the branches are those that this version writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from anabranch.offsets.hours import hour_of, shift

ROOT = Path(__file__).resolve().parents[2]
EARLIER = "0b9bb6ce163a493fc64cd88f6862309391b7997f"
"""The commit of the earlier version. Move it to the release before, once there is one."""
CODE = (
    "anabranch",
    "speed_layer",
    "batch_layer",
    "serving_layer",
    "tests/unit/lakes.py",
    "tests/unit/brokers.py",
)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the earlier version, from the history of this repository."""
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", EARLIER, *CODE], cwd=ROOT, capture_output=True)
    found = archive.stderr.decode()
    assert archive.returncode == 0, (
        f"expected commit {EARLIER} in the history (git fetch --unshallow), found {found}"
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    return folder


@pytest.fixture(params=[False, True], ids=["upgrade", "downgrade"])
def versions(request: pytest.FixtureRequest, earlier: Path) -> tuple[Path, Path]:
    """The code of the version that creates the tables, and of the one that continues them."""
    return (ROOT, earlier) if request.param else (earlier, ROOT)


def run(code: Path, lake: Path, first: str, *steps: str) -> dict[str, Any]:
    """Run steps by the code of a version; returns the state of the tables after them."""
    environment = os.environ | {"PYTHONPATH": f"{code}:{code / 'tests/unit'}"}
    script = ROOT / "tests" / "support" / "version_steps.py"
    command = [sys.executable, str(script), str(lake), first, *steps]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, (
        f"expected {steps} by {code} to succeed, found {ended.stderr[-3000:]}"
    )
    state: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert state.pop("code") == str(code), "expected the steps to run by the version's own code"
    return state


def test_a_table_of_one_version_is_read_continued_and_maintained_by_the_other(
    tmp_path: Path, versions: tuple[Path, Path]
) -> None:
    one, other = versions
    first = hour_of(datetime.now(UTC) - timedelta(days=10))
    hours = [shift(first, i) for i in range(3)]

    created = run(one, tmp_path, first, "create", "speed:0", "accept:0")
    assert run(other, tmp_path, first) == created
    continued = run(other, tmp_path, first, "apply", "speed:1", "accept:1", "maintain")
    assert continued["rows"]["speed"] == [], (
        "expected maintenance to drop the speed layer's rows of accepted hours"
    )
    assert run(one, tmp_path, first) == continued
    returned = run(one, tmp_path, first, "speed:2", "accept:2", "maintain")
    assert run(other, tmp_path, first) == returned

    assert returned["rows"]["main"] == [
        [hours[i], 0, 3 * i + k] for i in range(3) for k in range(2)
    ]
    assert returned["rows"]["batch"] == returned["rows"]["main"]
    assert returned["dead"]["main"] == [[hours[i], 0, 3 * i + 2] for i in range(3)]
    assert returned["offsets"] == {"0": 9}
    assert sorted(returned["accepted"]) == hours
    # `apply` restores the rows of sealed hours, which no step wrote.
    accepted = [row[:3] for row in returned["ledger"] if row[1] == "accepted"]
    assert sorted(accepted) == [[hour, "accepted", 1] for hour in hours]


def test_hours_without_records_of_one_version_stay_accepted_or_are_accepted_again_by_the_other(
    tmp_path: Path, versions: tuple[Path, Path]
) -> None:
    """Only `main` lists those of this version, which the earlier one accepts again."""
    one, other = versions
    first = hour_of(datetime.now(UTC) - timedelta(days=10))
    idle = [shift(first, 3 + i) for i in range(3)]

    made = run(one, tmp_path, first, "create", "speed:0", "accept:0", "idle:0")
    assert sorted(made["accepted"]) == [first, idle[0]]
    continued = run(other, tmp_path, first, "apply", "idle:1")
    returned = run(one, tmp_path, first, "idle:2", "speed:1", "accept:1")
    assert run(ROOT, tmp_path, first)["accepted"] == returned["accepted"]
    assert sorted(continued["accepted"]) == [first, *idle[:2]]
    assert sorted(returned["accepted"]) == [first, shift(first, 1), *idle]
    assert continued["rows"] == made["rows"]
    assert returned["rows"]["main"] == [
        [shift(first, i), 0, 3 * i + k] for i in range(2) for k in range(2)
    ]
    accepted = {row[0]: row[2] for row in returned["ledger"] if row[1] == "accepted"}
    assert accepted == dict.fromkeys([first, shift(first, 1), *idle], 1)
