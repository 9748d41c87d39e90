"""The soak's interference in a process: the clock set, commits delayed or lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lakes import StreamLake, new_lake
from soak.interference import Gateway, Interference

from anabranch.common.fail_points import FAIL_AT, Step

ROWS = [("2026-11-21T00", 0, o) for o in range(3)]
PUBLISH = """
import sys
from pathlib import Path
from lakes import StreamLake, new_environment, new_stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import find_staged
folder = Path(sys.argv[1])
environment = new_environment(folder)
one = StreamLake(folder, Lake(environment), new_stream(), environment)
print(one.publish(one.speed(find_staged(one.table(), "staged"), {0: 3})).name)
"""
ASK = "import time; print(time.time())"


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    made = new_lake(tmp_path / "lake")
    made.stage(ROWS, "staged")
    return made


@pytest.fixture
def interference(tmp_path: Path) -> Interference:
    return Interference(tmp_path / "orders")


@pytest.fixture
def gateway(interference: Interference, lake: StreamLake) -> Gateway:
    return Gateway(interference.requests, lake.again().catalog)


def run(
    interference: Interference, code: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process of the name `speed`, which knows the tests' modules too."""
    variables = os.environ | interference.environment("speed") | environment
    variables["PYTHONPATH"] += os.pathsep + os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_a_request_lands_after_its_sender_is_gone(
    interference: Interference, gateway: Gateway, lake: StreamLake
) -> None:
    interference.lose_requests("speed", [0.0])
    killed = run(interference, PUBLISH, str(lake.folder), **{FAIL_AT: Step.COMMIT_DOUBTED.label})
    assert killed.returncode == -9 and "answer lost" in killed.stderr, killed.stderr
    assert lake.rows("main") == []
    gateway.carry_out(time.monotonic() + 1)
    assert (gateway.landed, gateway.refused) == (1, 0)
    assert lake.rows("main") == lake.rows("speed") == ROWS
    assert lake.state().position.offsets == {0: 3}
    gateway.carry_out(time.monotonic() + 1)
    assert (gateway.landed, gateway.refused) == (1, 0), "each lands once"


def test_orders_are_for_one_name_and_end(interference: Interference, lake: StreamLake) -> None:
    interference.lose_requests("batch", [None])
    interference.lose_requests("speed", [None])
    interference.set_clock("speed", 600)
    interference.end()
    published = run(interference, PUBLISH + ASK, str(lake.folder)).stdout.split()
    assert published[0] == "LANDED" and abs(float(published[1]) - time.time()) < 60
    assert list(interference.requests.iterdir()) == []


@pytest.mark.parametrize("seconds", [600.0, -86_400.0])
def test_a_clock_is_set(interference: Interference, seconds: float) -> None:
    interference.set_clock("batch", 2 * seconds)
    interference.set_clock("speed", seconds)
    assert abs(float(run(interference, ASK).stdout) - time.time() - seconds) < 60
