"""Faults of a soak within a process: a wrong clock, and commits that succeed late.

The commands have no code for it. Python loads `sitecustomize` from a folder that the soak sets,
which imports this module. The clock is then read with an offset from a file, and a request to the
SQL catalog may be intercepted: its sender gets a connection error. A `Gateway` executes the request
later, like a gateway that timed out before its catalog; its requirements are checked then, as a
REST catalog does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.dev.services.processes import HOST

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

LOG = logging.getLogger(__name__)

# The folder of a process's orders: `clock` has the seconds that its clock is ahead; each
# `late-<id>` is for one request to intercept.
ORDERS = "ANABRANCH_INTERFERENCE"
SUPPORT = str(Path(__file__).resolve().parents[1])
"""The folder of this package, which a process needs in its path."""
_INSTALL = "from soak.interference import install\n\ninstall()\n"
_SITE = f"import sys\n\nsys.path.append({SUPPORT!r})\n{_INSTALL}"
_POLL_SECONDS = 0.2
_NEVER = -1.0


def install() -> None:
    """Make this process follow the orders of its folder, if it has one."""
    folder = os.environ.get(ORDERS)
    # Spark's workers use neither the catalog nor the clock.
    if not folder or any(word.startswith("pyspark.") for word in sys.orig_argv):
        return
    _shift_clock(Path(folder) / "clock")
    _lose_requests(Path(folder))


def _shift_clock(ahead: Path) -> None:
    real = time.time

    def now() -> float:
        try:
            return real() + float(ahead.read_text())
        except (OSError, ValueError):
            return real()

    time.time = now


def _lose_requests(folder: Path) -> None:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.table import CommitTableRequest, TableIdentifier

    real = SqlCatalog.commit_table

    def commit_table(self: SqlCatalog, table: Any, requirements: Any, updates: Any) -> Any:
        seconds = _take_order(folder)
        if seconds is None:
            return real(self, table, requirements, updates)
        identifier = TableIdentifier(namespace=table.name()[:-1], name=table.name()[-1])
        of = {"identifier": identifier, "requirements": requirements, "updates": updates}
        request = CommitTableRequest(**of)
        content = json.dumps({"after": seconds, "request": request.model_dump_json(by_alias=True)})
        replace_file(folder.parent / "requests" / f"{uuid.uuid4().hex}.json", content)
        raise ConnectionError(f"connection to the catalog at {HOST} reset by peer")

    SqlCatalog.commit_table = commit_table  # type: ignore[method-assign]


def replace_file(file: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new content."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, "utf-8")
    part.replace(file)


def _take_order(folder: Path) -> float | None:
    """Take an order to intercept a request; return the seconds until its execution, or None."""
    for order in sorted(folder.glob("late-*")):
        with suppress(FileNotFoundError):
            seconds = float(order.read_text())
            order.unlink()
            return seconds
    return None


class Interference:
    """The soak's side: orders for processes, by a name that the soak gives them."""

    def __init__(self, folder: Path) -> None:
        self.requests = folder / "requests"
        self._folder, self._site = folder, folder / "site"
        self.requests.mkdir(parents=True)
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(_SITE)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process that follows orders."""
        path = os.pathsep.join(filter(None, (str(self._site), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, ORDERS: str(self._orders(name))}

    def set_clock(self, name: str, seconds: float) -> None:
        """Set the clock of every process of this name ahead by `seconds`, at once."""
        replace_file(self._orders(name) / "clock", str(seconds))

    def lose_requests(self, name: str, after: list[float | None]) -> None:
        """Intercept the next requests to the catalog: executed `after` seconds, or never (None)."""
        for number, seconds in enumerate(after):
            delay = _NEVER if seconds is None else seconds
            replace_file(self._orders(name) / f"late-{time.monotonic_ns()}-{number}", str(delay))

    def drop_requests(self) -> None:
        """Drop the intercepted requests, which are then never executed."""
        for request in self.requests.glob("*.json"):
            request.unlink(missing_ok=True)

    def end(self) -> None:
        """Reset every clock, and intercept no further requests."""
        for pattern in ("*/clock", "*/late-*"):
            for order in self._folder.glob(pattern):
                order.unlink(missing_ok=True)

    def _orders(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder


class Gateway:
    """Executes intercepted requests, again until they are answered; one for `never` is dropped."""

    def __init__(self, requests: Path, catalog: Catalog) -> None:
        self._requests, self._catalog = requests, catalog
        self._due: dict[Path, float] = {}
        self._stop = threading.Event()
        self.landed = self.refused = self.dropped = 0

    @contextmanager
    def running(self) -> Iterator[Gateway]:
        """Execute due requests until the end of the `with`; execute the pending ones then."""
        thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(60)
        self.carry_out(float("inf"))

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self.carry_out(time.monotonic())

    def carry_out(self, now: float) -> None:
        """Execute all requests that are due at `now`."""
        for file in sorted(self._requests.glob("*.json")):
            try:
                delayed = json.loads(file.read_text("utf-8"))
            except FileNotFoundError:
                continue  # dropped in the meantime
            if delayed["after"] == _NEVER:
                self.dropped += 1
                file.unlink()
                continue
            if now >= self._due.setdefault(file, time.monotonic() + delayed["after"]):
                self._land(file, delayed["request"])

    def _land(self, file: Path, text: str) -> None:
        from pyiceberg.exceptions import CommitFailedException, ValidationException
        from pyiceberg.table import CommitTableRequest

        request = CommitTableRequest.model_validate_json(text)
        try:
            of = request.identifier
            table = self._catalog.load_table((*of.namespace.root, of.name))
            self._catalog.commit_table(table, request.requirements, request.updates)
            self.landed += 1
        except (CommitFailedException, ValidationException, ValueError) as error:
            LOG.debug("a late request is refused: %s", error)
            self.refused += 1
        except Exception as error:  # a service that does not answer
            LOG.debug("a late request has to wait: %s", error)
            return
        file.unlink(missing_ok=True)
