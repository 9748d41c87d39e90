"""The page's web application: routes, templates, error pages, and `/metrics` from the same
readings, read-only; and its HTTP server: one process, one socket, the allowed Hosts, and security
headers. A proxy authenticates users."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.common.output import text as printable
from anabranch.config import UNREADABLE, Slo
from anabranch.job import Job, StreamFolder
from anabranch.offsets.hours import hour_of, shift, start_of
from anabranch.operations.page.hour_view import (
    HELD,
    LETTERS,
    MARKS,
    HourRecord,
    HourRows,
    calendar_month,
    month_of,
    read_record,
    read_rows,
    sample_columns,
    short,
)
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

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src "
        "'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def allowed_hosts(host: str, names: Sequence[str], behind_proxy: bool) -> list[str]:
    """Return the Hosts that requests may have: a page that a browser reaches under another name is
    the target of DNS rebinding. Raises ConfigurationError if the page would be open to everyone."""
    if not behind_proxy and not _is_loopback(host):
        raise ConfigurationError(
            f"--host {host}: expected --behind-proxy, for a proxy that authenticates users, found "
            "none; without it the page listens on loopback addresses only"
        )
    if wrong := [name for name in names if "*" in name]:
        raise ConfigurationError(f"--allow-host: expected a host name, found {wrong[0]!r}")
    return [*_LOOPBACK, *(f"[{name}]" if ":" in name else name for name in (host, *names))]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SecurityHeaders:
    """Middleware that adds the security headers to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


_REQUEST_WITHIN_S = 10.0


class _BoundedConnection(H11Protocol):
    """A connection that is closed when no request began for a while and none is in progress.
    uvicorn itself waits for ever for the rest of a request's head, and its limit of connections
    would refuse everybody as soon as enough clients send half a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_REQUEST_WITHIN_S, self._close_idle, None)

    def _close_idle(self, before: object) -> None:
        newest = self.cycle
        is_in_progress = newest is not None and not newest.response_complete
        if newest is before and not is_in_progress:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_REQUEST_WITHIN_S, self._close_idle, newest)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigurationError when the address cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"page: expected to listen at {host}:{port}, found: {error.strerror or error}; "
            "choose another --port"
        ) from error


def server(app: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_BoundedConnection,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_graceful_shutdown=3,
            ws="none",
        )
    )


def run(app: ASGIApp, at: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    # uvicorn raises the signal again after its shutdown.
    with suppress(KeyboardInterrupt):
        server(app).run(sockets=[at])


_PACKAGE = "anabranch.operations.page"
# The first response must arrive within 300 ms; a value not read by then arrives with a later
# refresh.
_PATIENCE = timedelta(milliseconds=150)
_ROWS_FRESH_FOR = timedelta(minutes=5)


@dataclass(frozen=True)
class Settings:
    """How often streams are read, when an answer is overdue, when a speed layer is late."""

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
        """Return the application for requests to these Hosts; the readers run for its lifetime."""

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
    made.filters["short"] = short
    made.filters["sample_columns"] = sample_columns
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
