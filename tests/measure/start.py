"""How long a command takes that needs no Spark: `make bench WHAT=start`.

Each command runs as a process of its own against a real Kafka and a real S3 server that hold some
rows, all of them in turn, several rounds. Seconds are medians, the slowest beside them; CPU seconds
are of all the process's threads. The first two lines are lower bounds: Python alone, and the
libraries that a table is read with.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

from children_cpu import children_cpu
from demo.story import Story
from demo.workspace import Workspace, main, open_workspace

from anabranch.dev.producers.produce import STREAM, produce_events
from anabranch.protocol.state import load_state

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "7"))
EVENTS = 20_000


@dataclass
class Taken:
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def cells(self) -> tuple[str, str, str]:
        return (
            f"{statistics.median(self.seconds):.2f}",
            f"{max(self.seconds):.2f}",
            f"{statistics.median(self.cpu):.2f}",
        )


def commands(hour: str) -> dict[str, list[str]]:
    python, anabranch = [sys.executable, "-c"], [sys.executable, "-m", "anabranch.cli"]
    ours = {
        "--help": ["--help"],
        "status": ["status", STREAM],
        "hours": ["hours", STREAM],
        "explain": ["explain", STREAM, hour],
        "query": ["query", "SELECT count(*) FROM games.game_events"],
        "dead-letters": ["dead-letters", STREAM],
        "audit --no-kafka": ["audit", STREAM, "--no-kafka"],
        "audit": ["audit", STREAM],
        "merge --dry-run": ["merge", STREAM, "--dry-run"],
        "maintain --dry-run": ["maintain", STREAM, "--dry-run"],
    }
    return {
        "Python alone": [*python, "pass"],
        "Python with PyIceberg, PyArrow, kafka-python, pydantic": [
            *python,
            (
                "import anabranch.table, pyiceberg.table, pyiceberg.catalog, "
                "pyiceberg.io.pyarrow, pydantic, kafka"
            ),
        ],
        **{name: [*anabranch, *arguments] for name, arguments in ours.items()},
    }


def run(space: Workspace, command: list[str], taken: Taken) -> None:
    before, began = children_cpu(), time.monotonic()
    # Compiled once, as an installation is.
    compiled = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(space.folder / "compiled"),
    }
    environment = os.environ | compiled | {"ANABRANCH_CONF": str(space.conf)}
    done = subprocess.run(
        command, env=environment, cwd=space.folder, capture_output=True, text=True, timeout=120
    )
    taken.seconds.append(time.monotonic() - began)
    taken.cpu.append(children_cpu() - before)
    # `audit` and `status` have exit codes of their own for what they find.
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )


def measure(story: Story) -> None:
    """Fill a table, run all commands in turn, print what they took."""
    story.title("What a command takes that needs no Spark")
    with open_workspace(story, STREAM) as space:
        space.run("apply", STREAM, show=False)
        job = space.job(STREAM)
        produce_events(job.environment.kafka, job.stream.topic, events=EVENTS)
        space.run("speed", STREAM, "--available-now", show=False)
        hour = load_state(job.lake, job.stream.table).timeline.open
        job.kafka.close()
        table = {name: Taken() for name in commands(hour)}
        for number in range(ROUNDS + 1):
            for name, command in commands(hour).items():
                # The first round fills the caches of files.
                run(space, command, table[name] if number else Taken())
        rows = [(name, *taken.cells()) for name, taken in table.items()]
        story.table(("command", "seconds", "slowest", "CPU s"), rows)


if __name__ == "__main__":
    sys.exit(main(measure))
