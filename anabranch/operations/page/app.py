"""The page's web application: routes, templates, error pages, and `/metrics` from the same
readings. Read-only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.common.output import text as printable
from anabranch.config import UNREADABLE, Slo
from anabranch.job import Job, StreamFolder
from anabranch.offsets.hours import hour_of, shift, start_of
from anabranch.operations.page.hour_calendar import HELD, LETTERS, MARKS, calendar_month, month_of
from anabranch.operations.page.hour_view import (
    HourRecord,
    HourRows,
    read_record,
    read_rows,
    sample_line,
)
from anabranch.operations.page.server import SecurityHeaders
from anabranch.operations.page.streams import (
    StreamLine,
    outages,
    sections_of,
    stream_line,
    summary_words,
)
from anabranch.operations.reports.acts import hours_words, outcome_words
from anabranch.operations.reports.metrics import ScrapedStream, metrics_of
from anabranch.operations.reports.reading import (
    BackgroundReader,
    FollowedStream,
    FollowedStreams,
    OnDemand,
    Readings,
    TimedValue,
    open_reader,
    utc_now,
)
from anabranch.operations.reports.status import overdue_words
from anabranch.protocol.registers import span_words

_PACKAGE = "anabranch.operations.page"
# The first response must arrive within 300 ms; a value not read by then arrives with a later
# refresh.
_PATIENCE = timedelta(milliseconds=150)
_ROWS_FRESH_FOR = timedelta(minutes=5)


@dataclass(frozen=True)
class Settings:
    """How often streams are read, when an answer is overdue, and when a speed layer counts as
    late."""

    every: timedelta = timedelta(seconds=10)
    deadline: timedelta = timedelta(seconds=30)
    late_after: timedelta = timedelta(minutes=10)


class Page(Collector):
    """The streams' readings, and the responses built from them. Follows the folder's streams."""

    def __init__(
        self, folder: StreamFolder, settings: Settings, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._settings, self._now = settings, now
        self._followed = FollowedStreams(
            folder, lambda job: open_reader(job, settings.late_after, now), settings.every, now
        )
        self._records = OnDemand[HourRecord](settings.every, now=now)
        self._rows = OnDemand[HourRows](_ROWS_FRESH_FOR, now=now)
        self._templates = Jinja2Templates(env=_environment())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @property
    def readers(self) -> Mapping[str, BackgroundReader[Readings]]:
        return {name: shown.reader for name, shown in self._followed.current.items()}

    def follow(self) -> None:
        """Update the streams: show new and changed files at once, and drop deleted ones."""
        self._forget(self._followed.follow())

    def _forget(self, streams: Collection[str]) -> None:
        for name in streams:
            self._records.forget(name)
            self._rows.forget(name)

    def app(self, hosts: Sequence[str]) -> ASGIApp:
        """Return the application, which answers requests to these Hosts; the readers run for its
        lifetime."""

        @asynccontextmanager
        async def running(app: Starlette) -> AsyncIterator[None]:
            self._followed.start(self._forget)
            try:
                yield
            finally:
                self._followed.stop()
                self._records.stop()
                self._rows.stop()

        routes = [
            Route("/", self._streams),
            Route("/streams/{stream}", self._stream),
            Route("/streams/{stream}/hours/{hour}", self._hour),
            Route("/metrics", self._metrics),
            Mount("/static", StaticFiles(packages=[(_PACKAGE, "static")])),
        ]
        # An hour at the limit of the supported range has no neighbour; it is reported as not found,
        # too.
        handlers = dict.fromkeys(
            (HTTPException, ConfigurationError, OverflowError), self._not_found
        )
        handlers[Exception] = self._failed
        app = Starlette(routes=routes, lifespan=running, exception_handlers=handlers)
        # Outermost, so that errors and refused Hosts have the headers too.
        return SecurityHeaders(TrustedHostMiddleware(app, hosts, www_redirect=False))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest readings, without reading anything."""
        now, groups = self._now(), self._groups()
        scraped = {}
        for name, shown in self._followed.current.items():
            reading = shown.reader.reading
            is_up = self._why_old(reading, now) is None
            slo = shown.job.stream.slo if isinstance(shown.job, Job) else Slo()
            scraped[name] = ScrapedStream(
                slo, groups[name], reading.as_of, reading.value if is_up else None
            )
        return metrics_of(scraped)

    def _metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), media_type=content_type)

    def _groups(self) -> dict[str, str | None]:
        known = self._followed.folder.groups
        return {
            name: shown.job.stream.group
            if isinstance(shown.job, Job)
            else known.get(name, UNREADABLE)
            for name, shown in self._followed.current.items()
        }

    def _why_old(self, reading: TimedValue[Readings], now: datetime) -> str | None:
        return reading.why_old(now, self._settings.deadline, self._settings.every)

    def _streams(self, request: Request) -> Response:
        now = self._now()
        wanted = request.query_params.get("name", "")
        only_wrong = "wrong" in request.query_params
        every = [
            self._line(name, shown.reader.reading, now)
            for name, shown in self._followed.current.items()
        ]
        lines = [
            line
            for line in every
            if wanted in line.name and (line.condition.is_wrong or not only_wrong)
        ]
        return self._answer(
            request,
            "streams.html",
            now,
            sections=sections_of(lines, self._groups(), self._followed.folder.families),
            outages=outages(every),
            found=len(lines),
            wanted=wanted,
            only_wrong=only_wrong,
            summary=summary_words(every),
        )

    def _line(self, name: str, reading: TimedValue[Readings], now: datetime) -> StreamLine:
        return stream_line(name, reading, self._why_old(reading, now))

    def _stream(self, request: Request) -> Response:
        (name, shown), now = self._stream_of(request), self._now()
        month = request.query_params.get("month")
        named = month_of(month) if month is not None else None
        reading = shown.reader.reading
        view, calendar = reading.value, None
        if view is not None:
            calendar = calendar_month(view.status, named, view.at)
        line = self._line(name, reading, now)
        return self._answer(
            request,
            "stream.html",
            now,
            line=line,
            view=view,
            calendar=calendar,
            legend=LETTERS,
            marks=MARKS,
            held_mark=HELD,
            summary=summary_words([line]),
        )

    def _hour(self, request: Request) -> Response:
        (name, shown), hour = self._stream_of(request), request.path_params["hour"]
        start_of(hour)
        if isinstance(job := shown.job, AnabranchError):
            raise job
        key = (name, hour)
        before, after = shift(hour, -1), shift(hour, 1)
        record = self._records.get(key, lambda: read_record(job, hour, self._now()), _PATIENCE)
        rows = self._rows.get(key, lambda: read_rows(job, hour), _PATIENCE)
        now = self._now()
        page, of_rows = record.value, rows.value
        view = shown.reader.reading.value
        first = view.status.first_hour if view is not None else None
        differing = of_rows.difference if of_rows is not None else None
        return self._answer(
            request,
            "hour.html",
            now,
            stream=name,
            hour=hour,
            page=page,
            record=record,
            rows=rows,
            of_rows=of_rows,
            samples=[sample_line(s) for s in differing.samples] if differing is not None else [],
            why_record=record.why_old(now, self._settings.deadline, self._settings.every),
            why_rows=rows.why_old(now, self._settings.deadline, _ROWS_FRESH_FOR),
            before=before if first is None or first < hour else None,
            after=after if hour < hour_of(now) else None,
            summary=dict(page.sentences)["hour"] if page is not None else f"{hour} of {name}",
        )

    def _stream_of(self, request: Request) -> tuple[str, FollowedStream]:
        name, streams = request.path_params["stream"], self._followed.current
        if name not in streams:
            raise HTTPException(
                404, f"expected one of the streams {', '.join(streams)}, found {name!r}"
            )
        return name, streams[name]

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        message = error.detail if isinstance(error, HTTPException) else str(error)
        headers = error.headers if isinstance(error, HTTPException) else None
        answer = self._answer(
            request, "error.html", self._now(), status, message=message, summary=message
        )
        answer.headers.update(headers or {})
        return answer

    async def _failed(self, request: Request, error: Exception) -> Response:
        message = "The page failed; see its log."
        return self._answer(
            request, "error.html", self._now(), 500, message=message, summary=message
        )

    def _answer(
        self, request: Request, template: str, now: datetime, status: int = 200, **context: Any
    ) -> Response:
        context |= {
            "now": now,
            "every": max(1, round(self._settings.every.total_seconds())),
            "deadline": self._settings.deadline,
        }
        return self._templates.TemplateResponse(request, template, context, status)


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["commands"] = split_commands
    made.filters["number"] = lambda value: f"{value:,}"
    made.filters["printable"] = printable
    made.filters["act_hours"] = hours_words
    made.filters["overdue"] = overdue_words
    made.filters["holds"] = span_words
    made.filters["act_outcome"] = outcome_words
    made.filters["size"] = lambda value: (
        f"{value / 1e6:,.1f} MB" if value >= 1e6 else f"{value / 1e3:,.1f} kB"
    )
    return made


def split_commands(text: str) -> list[tuple[str, bool]]:
    """Split text into parts, each with whether it was between backticks. Pure."""
    return [(part, i % 2 == 1) for i, part in enumerate(text.split("`")) if part]
