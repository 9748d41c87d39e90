"""What a soak does to a process from inside, where no signal reaches: its clock is set, its commits
land late.

Our commands do not know of it. Python loads `sitecustomize` from a folder that the soak sets, which
imports this module: this machine's clock is then read with an offset from a file, and a request to
the SQL catalog may be taken away from its sender, whose connection breaks. A `Gateway` carries it
out later, as one does that gave up waiting for the catalog behind it; what the request requires is
compared then, as a REST catalog does.
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

from anabranch.dev.services.processes import HOST, write_whole

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

LOG = logging.getLogger(__name__)

# The folder of a process's orders: `clock`, seconds that its clock is ahead; `late-<id>`, each a
# request to take away.
ORDERS = "ANABRANCH_INTERFERENCE"
SUPPORT = str(Path(__file__).resolve().parents[1])
"""The folder of this package, which a process of ours needs in its path."""
_SITE = (
    f"import sys\n\nsys.path.append({SUPPORT!r})\nfrom soak.interference import "
    "install\n\ninstall()\n"
)
_POLL_SECONDS = 0.2
_NEVER = -1.0


def install() -> None:
    """In a process of ours: obey the orders of its folder, if it has one."""
    folder = os.environ.get(ORDERS)
    # Spark's workers read no catalog and ask for no time.
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
        request = CommitTableRequest(
            identifier=identifier, requirements=requirements, updates=updates
        )
        content = json.dumps({"after": seconds, "request": request.model_dump_json(by_alias=True)})
        write_whole(folder.parent / "requests" / f"{uuid.uuid4().hex}.json", content)
        raise ConnectionError(f"connection to the catalog at {HOST} reset by peer")

    SqlCatalog.commit_table = commit_table  # type: ignore[method-assign]


def _take_order(folder: Path) -> float | None:
    """An order to take a request away, and after how many seconds it is to land; each is obeyed
    once."""
    for order in sorted(folder.glob("late-*")):
        with suppress(FileNotFoundError):
            seconds = float(order.read_text())
            order.unlink()
            return seconds
    return None


class Interference:
    """The soak's end: orders to the processes of each name, which are whatever the soak calls
    them."""

    def __init__(self, folder: Path) -> None:
        self.requests = folder / "requests"
        self._folder, self._site = folder, folder / "site"
        self.requests.mkdir(parents=True)
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(_SITE)

    def environment(self, name: str) -> dict[str, str]:
        """What a process needs in its environment to obey."""
        path = os.pathsep.join(filter(None, (str(self._site), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, ORDERS: str(self._orders(name))}

    def set_clock(self, name: str, seconds: float) -> None:
        """Put the clock of every process of that name ahead of what it would say, at once."""
        write_whole(self._orders(name) / "clock", str(seconds))

    def lose_requests(self, name: str, after: list[float | None]) -> None:
        """Take the next requests to the catalog away; each lands after so many seconds, or never
        for None."""
        for number, seconds in enumerate(after):
            delay = _NEVER if seconds is None else seconds
            write_whole(self._orders(name) / f"late-{time.monotonic_ns()}-{number}", str(delay))

    def drop_requests(self) -> None:
        """Requests that were taken away are never carried out."""
        for request in self.requests.glob("*.json"):
            request.unlink(missing_ok=True)

    def end(self) -> None:
        """Every clock is right again, and no request is taken away any more."""
        for pattern in ("*/clock", "*/late-*"):
            for order in self._folder.glob(pattern):
                order.unlink(missing_ok=True)

    def _orders(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder


class Gateway:
    """Carries out requests that were taken away from their senders. `landed` and `refused` count
    the results.

    A request that gets no answer is sent again; one that is to land never does nothing.
    """

    def __init__(self, requests: Path, catalog: Catalog) -> None:
        self._requests, self._catalog = requests, catalog
        self._due: dict[Path, float] = {}
        self._stop = threading.Event()
        self.landed = self.refused = self.dropped = 0

    @contextmanager
    def running(self) -> Iterator[Gateway]:
        """Until the end of the `with`; pending requests are then carried out at once, again if
        needed."""
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
        """Let all land whose time has come by then."""
        for file in sorted(self._requests.glob("*.json")):
            try:
                delayed = json.loads(file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue  # dropped meanwhile
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
            table = self._catalog.load_table(
                (*request.identifier.namespace.root, request.identifier.name)
            )
            self._catalog.commit_table(table, request.requirements, request.updates)
            self.landed += 1
        except (CommitFailedException, ValidationException, ValueError) as error:
            LOG.debug("a late request is refused: %s", error)
            self.refused += 1
        except Exception as error:  # a service that does not answer
            LOG.debug("a late request has to wait: %s", error)
            return
        file.unlink(missing_ok=True)
