"""The consumer of docs/how-to/follow-changes.md, in a separate process."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from world import World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "follow-changes.md"


def code_of_page(section: str) -> str:
    """Return the first Python block of a section of docs/how-to/follow-changes.md."""
    text = PAGE.read_text("utf-8").partition(f"\n{section}\n")[2]
    return text.partition("```python\n")[2].partition("```")[0]


@contextmanager
def consumer(one: World, own: Path) -> Iterator[None]:
    """Run the page's consumer into a database of its own, from its imports on, and kill it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["ANABRANCH_CONF"] = str(one.folder)
    follow = "print(flush=True)\nfollow(sys.argv[1], sqlite3.connect(sys.argv[2]))"
    code = f"import sqlite3, sys\n{code_of_page('## Python')}\n{follow}"
    command = [sys.executable, "-c", code, one.name, str(own)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield
            assert process.poll() is None, "expected the consumer to follow until it is killed"
        finally:
            process.kill()


def consumed(own: Path) -> tuple[list[tuple[str, int, str]], list[tuple[int, int, str]]]:
    """Return the consumer's data: the revision and layer of each hour, and the events."""
    if not own.exists():
        return [], []
    with closing(sqlite3.connect(own, timeout=30)) as connection:
        try:
            hours = connection.execute("SELECT hour, revision, served FROM hours ORDER BY hour")
            events = connection.execute("SELECT partition, offset, event_id FROM events")
            return hours.fetchall(), sorted(events.fetchall())
        except sqlite3.OperationalError:
            return [], []


def complete(one: World) -> list[tuple[int, int, str]]:
    """The rows of the accepted hours in `main`, as `consumed` has them."""
    accepted = one.state.accepted
    rows = [r for r in one.rows() if r["ingest_hour"] in accepted]
    return sorted((r["kafka_partition"], r["kafka_offset"], r["event_id"]) for r in rows)
