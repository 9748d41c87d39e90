"""The status page over a lake in a folder, asked as a browser asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from anabranch.hours import hour_of, hours_between, shift
from anabranch.job import Job
from serving_layer.page.access import Access
from serving_layer.page.app import Page, Settings
from serving_layer.page.reading import Reading, utc_now
from serving_layer.page.streams import StreamView
from serving_layer.views.facts import Counts
from serving_layer.views.status import GateSummary, HourSummary, Lag, StreamStatus

if TYPE_CHECKING:
    from starlette.testclient import TestClient

_VOID = {"meta", "link", "input", "br"}


@dataclass
class Parsed(HTMLParser):
    """What a page is made of: its text, its elements by tag with their attributes, and what was closed wrongly."""

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


def new_page(*jobs: Job, access: Access | None = None, now: Callable[[], datetime] = utc_now) -> Page:
    """A page whose readers read when they are told to, and which counts an answer as overdue after 30 s."""
    settings = Settings(timedelta(seconds=10), timedelta(seconds=30), timedelta(minutes=10))
    return Page(jobs, access or Access(), settings, now)


def browser(page: Page, host: str = "localhost") -> TestClient:
    """Without the page's own threads: its start is not run."""
    from starlette.testclient import TestClient

    return TestClient(page.app(), base_url=f"http://{host}", follow_redirects=False, raise_server_exceptions=False)


def five_years(name: str, as_of: datetime, **changes: Any) -> StreamView:
    """A stream of five years of accepted hours, but for what `changes` of its status say; as `status` tells it."""
    running = hour_of(as_of)
    accepted = shift(running, -1)
    given: dict[str, Any] = {
        "stream": name, "topic": name, "topic_id": "z8XKj-3aS8unzq2Q1f17iA", "topic_recreated": False,
        "position": {0: 5_000_000, 1: 4_900_000}, "position_since": as_of - timedelta(seconds=2), "late": None,
        "lag": Lag(180, {0: 100, 1: 80}),
        "last_publish": dict.fromkeys(("speed", "batch", "main"), as_of - timedelta(seconds=2)),
        "first_hour": shift(running, -5 * 365 * 24), "open_hour": running, "newest_accepted": accepted,
        "complete_through": accepted, "to_seal": [], "backlog": [], "refused": [],
        "hours": dict.fromkeys(hours_between(shift(running, -48), running), "batch"),
        "unexplained": {}, "dead_letters": 4711, "lost": {},
    }  # fmt: skip
    day = [
        HourSummary(
            hour, "accepted", 1, "batch", None, Counts(36_000 * (3 + i % 7), None, None, None, None), None, None,
            GateSummary(), None,
        )
        for i, hour in enumerate(hours_between(shift(running, -24), running))
    ]  # fmt: skip
    return StreamView(StreamStatus(**(given | changes)), day)


def show(page: Page, as_of: datetime, *views: StreamView) -> None:
    """Let the page know what it would have read at a moment."""
    for view in views:
        page.readers[view.status.stream].reading = Reading(view, as_of)


def named(one: Job, name: str) -> Job:
    """A job of another stream on the same lake."""
    return replace(one, stream=one.stream.model_copy(update={"name": name}))
