"""The status page over a lake in a folder, asked as a browser asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import AnabranchError
from anabranch.iceberg.clock import Clock
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, hours_between, shift
from anabranch.operations.page.app import Page, Settings
from anabranch.operations.reports.maintenance import Maintenance, TableGrowth
from anabranch.operations.reports.reading import Readings, TimedValue, utc_now
from anabranch.operations.reports.status import Lag, StreamStatus
from anabranch.protocol.measured import MaintainedTable, MaintenanceRun, Size

if TYPE_CHECKING:
    from starlette.testclient import TestClient

HOSTS = ["localhost", "127.0.0.1", "[::1]", "status.example.com"]
_VOID = {"meta", "link", "input", "br"}


@dataclass
class Parsed(HTMLParser):
    """A page's text, its elements by tag with attributes, and wrongly closed tags."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def parsed(html: str) -> Parsed:
    page = Parsed()
    page.feed(html)
    page.close()
    assert page.wrong == [], "elements are closed in the order in which they were opened"
    return page


def new_page(*jobs: Job, now: Callable[[], datetime] = utc_now) -> Page:
    """A page whose readers read on request, and which counts an answer as overdue after 30 s."""
    settings = Settings(timedelta(seconds=10), timedelta(seconds=30), timedelta(minutes=10))
    return Page(folder_of(*jobs), settings, now)


def stand_still(lake: Lake) -> None:
    """Compare the lake's clock with no monotonic one: the test's time stands still."""
    lake.__dict__["clock"] = Clock(None, elapsed=lambda: 0.0)


def folder_of(*jobs: Job, **broken: AnabranchError) -> Any:
    """A folder of these streams, and of streams with an invalid file."""
    by_name = {job.stream.name: job for job in jobs} | broken
    return SimpleNamespace(jobs=lambda: by_name, groups={}, families={})


def browser(page: Page, host: str = "localhost") -> TestClient:
    """Return a client of the page without its threads: it does not run the page's start."""
    from starlette.testclient import TestClient

    how: Any = {"follow_redirects": False, "raise_server_exceptions": False}
    return TestClient(page.app(HOSTS), base_url=f"http://{host}", **how)


def five_years(name: str, as_of: datetime, **changes: Any) -> Readings:
    """The status of a stream of five years of accepted hours, with the `changes`."""
    running = hour_of(as_of)
    accepted = shift(running, -1)
    given: dict[str, Any] = {
        "stream": name, "topic": name, "topic_id": "z8XKj-3aS8unzq2Q1f17iA",
        "topic_recreated": False, "position": {0: 5_000_000, 1: 4_900_000},
        "position_since": as_of - timedelta(seconds=2), "late": None,
        "lag": Lag(180, {0: 100, 1: 80}),
        "last_publish": dict.fromkeys(("speed", "batch", "main"), as_of - timedelta(seconds=2)),
        "first_hour": shift(running, -5 * 365 * 24), "open_hour": running,
        "newest_accepted": accepted, "accepted_at": None,
        "waiting_since": as_of - timedelta(seconds=2), "complete_through": accepted, "to_seal": [],
        "backlog": [], "refused": [],
        "hours": dict.fromkeys(hours_between(shift(running, -48), running), "batch"),
        "unexplained": {}, "dead_letters": 4711, "lost": {},
    }  # fmt: skip
    return Readings(as_of, StreamStatus(**(given | changes)), maintenance=maintained(name, as_of))


def maintained(name: str, as_of: datetime) -> Maintenance:
    """Eight nights of maintenance, the first without listing; two days wait for batch."""
    runs = []
    for back in range(8):
        ended = as_of.replace(hour=2, minute=41, second=7 + back) - timedelta(days=back)
        sizes = (Size(3 * back, 4_400_000 * back), Size(211, 23_000_000))
        of_rows = MaintainedTable(96 + back, 0, *sizes)
        did = {f"games.{name}": of_rows, f"games.{name}_hours": MaintainedTable(3, 31)}
        away = {"orphans": "list s3://lake/games: expected an answer, found none"}
        failed = away if back == 7 else {}
        runs.append(MaintenanceRun(ended - timedelta(seconds=42), ended, 24, did, failed))
    tables = {
        f"games.{name}": TableGrowth(412_331, 131, 169, 318, 61_204, 9_812_004_117, 31),
        f"games.{name}_dead_letters": TableGrowth(120_554, 104, 0, 41, 988, 4711, 4),
        f"games.{name}_hours": TableGrowth(24_871, 22, 0, 3, 24, 87_601, 2),
    }
    hours = enumerate(hours_between(shift(hour_of(as_of), -4), hour_of(as_of)))
    return Maintenance(runs, tables, speed_files={hour: 31 - i for i, hour in hours})


def show(page: Page, as_of: datetime, *views: Readings) -> None:
    """Let the page know what it would have read at a moment."""
    for view in views:
        page.readers[view.status.stream].reading = TimedValue(view, as_of)


def named(one: Job, name: str, group: str | None = None) -> Job:
    """A job of another stream on the same lake."""
    return replace(one, stream=one.stream.model_copy(update={"name": name, "group": group}))
