"""The page's web application: routes, templates and error pages. Read-only."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.common.output import text as printable
from anabranch.config import UNREADABLE
from anabranch.job import Job, StreamFolder, groups_of
from anabranch.offsets.hours import hour_of, shift, start_of
from anabranch.operations.page import charts
from anabranch.operations.page.access import COOKIE, LOGIN, Access, Guard
from anabranch.operations.page.hour_calendar import HELD, LETTERS, MARKS, calendar_month, month_of
from anabranch.operations.page.hour_view import (
    HourRecord,
    HourRows,
    read_record,
    read_rows,
    sample_line,
)
from anabranch.operations.page.streams import (
    StreamLine,
    StreamReports,
    group_lines,
    read_stream,
    stream_line,
    summary_words,
)
from anabranch.operations.reports.acts import hours_words, outcome_words
from anabranch.operations.reports.reading import (
    Background,
    BackgroundReader,
    FollowedStream,
    FollowedStreams,
    OnDemand,
    TimedValue,
    utc_now,
)
from anabranch.operations.reports.status import cost_words, overdue_words
from anabranch.protocol.holds import span_words

_PACKAGE = "anabranch.operations.page"
_STATIC = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_LONGEST_FORM = 4096
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


def _group(
    name: str, shown: FollowedStream[StreamReports], known: Mapping[str, str | None]
) -> str | None:
    return shown.job.stream.group if isinstance(shown.job, Job) else known.get(name, UNREADABLE)


class Page:
    """The streams' readings, and the responses built from them. Follows the folder's streams."""

    def __init__(
        self,
        folder: StreamFolder,
        access: Access,
        settings: Settings,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._access, self._settings, self._now = access, settings, now
        self._followed = FollowedStreams(folder, "stream", self._opened, now)
        self._followed.update()
        self._background = Background[StreamReports](settings.every)
        self._records = OnDemand[HourRecord](settings.every, now=now)
        self._rows = OnDemand[HourRows](_ROWS_FRESH_FOR, now=now)
        self._templates = _templates()
        self._static = {
            name: files(_PACKAGE).joinpath("static", name).read_bytes() for name in _STATIC
        }

    @property
    def readers(self) -> Mapping[str, BackgroundReader[StreamReports]]:
        return {name: shown.reader for name, shown in self._followed.current.items()}

    def _opened(self, job: Job) -> Callable[[], StreamReports]:
        return lambda: read_stream(job, self._settings.late_after, self._now())

    def follow(self) -> None:
        """Update the streams: show new and changed files at once, and drop deleted ones."""
        before = self._followed.current
        for name, old in self._followed.update(keep=True).items():
            self._background.drop(old.reader)
            self._records.forget(name)
            self._rows.forget(name)
        current = self._followed.current
        self._background.start(
            [new.reader for name, new in current.items() if before.get(name) is not new]
        )

    def app(self) -> ASGIApp:
        """Return the application; the readers run for its lifetime."""

        @asynccontextmanager
        async def running(app: Starlette) -> AsyncIterator[None]:
            self._background.start(list(self.readers.values()))
            self._background.each(self.follow)
            try:
                yield
            finally:
                self._background.stop()
                self._records.stop()
                self._rows.stop()

        routes = [
            Route("/", self._streams),
            Route("/streams/{stream}", self._stream),
            Route("/streams/{stream}/hours/{hour}", self._hour),
            Route("/static/{name}", self._file),
            Route(LOGIN, self._login_form, methods=["GET"]),
            Route(LOGIN, self._login, methods=["POST"]),
        ]
        # An hour at the limit of the supported range has no neighbour; it is reported as not found,
        # too.
        handlers = dict.fromkeys(
            (HTTPException, ConfigurationError, OverflowError), self._not_found
        )
        handlers[Exception] = self._failed
        # The guard is outermost, so that error responses have the headers too.
        return Guard(
            Starlette(routes=routes, lifespan=running, exception_handlers=handlers), self._access
        )

    def _streams(self, request: Request) -> Response:
        now = self._now()
        streams = self._followed.current
        lines = [self._line(name, shown.reader.reading, now) for name, shown in streams.items()]
        known = self._followed.folder.groups
        groups = group_lines(
            groups_of({name: _group(name, shown, known) for name, shown in streams.items()}), lines
        )
        return self._answer(
            request, "streams.html", now, lines=lines, groups=groups, summary=summary_words(lines)
        )

    def _line(self, name: str, reading: TimedValue[StreamReports], now: datetime) -> StreamLine:
        return stream_line(name, reading, now, self._settings.deadline, self._settings.every)

    def _stream(self, request: Request) -> Response:
        (name, shown), now = self._stream_of(request), self._now()
        month = request.query_params.get("month")
        named = month_of(month) if month is not None else None
        reading = shown.reader.reading
        view, calendar, drawn = reading.value, None, None
        if view is not None and reading.as_of is not None:
            calendar = calendar_month(view.status, named, reading.as_of)
            drawn = {
                "throughput": charts.throughput(view.day),
                "freshness": charts.freshness(view.measured, view.promised, reading.as_of),
                "micro_batches": charts.micro_batches(view.measured, reading.as_of),
            }
        line = self._line(name, reading, now)
        return self._answer(
            request,
            "stream.html",
            now,
            line=line,
            view=view,
            calendar=calendar,
            drawn=drawn,
            charts=charts,
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

    def _stream_of(self, request: Request) -> tuple[str, FollowedStream[StreamReports]]:
        name, streams = request.path_params["stream"], self._followed.current
        if name not in streams:
            raise HTTPException(
                404, f"expected one of the streams {', '.join(streams)}, found {name!r}"
            )
        return name, streams[name]

    def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._static:
            raise HTTPException(404, f"expected one of {', '.join(_STATIC)}, found {name!r}")
        return _with_etag(request, self._static[name], _STATIC[name])

    def _login_form(self, request: Request) -> Response:
        return self._answer(request, "login.html", self._now(), refused=False, summary="Token")

    async def _login(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LONGEST_FORM:
                raise HTTPException(413, "expected a token, found a longer body")
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()
        if not self._access.is_token(given):
            return self._answer(
                request, "login.html", self._now(), 403, refused=True, summary="Token"
            )
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE,
            self._access.cookie(),
            httponly=True,
            samesite="strict",
            secure=self._access.over_tls,
            path="/",
        )
        return answer

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
        every = max(1, round(self._settings.every.total_seconds()))
        text = self._templates.get_template(template).render(
            now=now,
            every=every,
            deadline=self._settings.deadline,
            has_token=self._access.token is not None,
            **context,
        )
        return _with_etag(request, text.encode(), "text/html; charset=utf-8", status)


def _with_etag(request: Request, body: bytes, media_type: str, status: int = 200) -> Response:
    """Return the body, or 304 if the client already has it."""
    if status != 200:
        return Response(body, status, media_type=media_type)
    tag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    known = {
        part.strip().removeprefix("W/")
        for part in request.headers.get("if-none-match", "").split(",")
    }
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def _templates() -> Environment:
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
    made.filters["cost"] = cost_words
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
