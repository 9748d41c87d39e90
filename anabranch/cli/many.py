"""Commands on several streams: the selection, and concurrent reading of the streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.cli.options import StreamSelection, conf_folder, explain, open_stream
from anabranch.cli.report import Report, Result, StreamReports
from anabranch.common.deadline import LAKE
from anabranch.common.errors import AnabranchError
from anabranch.common.logs import fields

if TYPE_CHECKING:
    from anabranch.common.deadline import Note
    from anabranch.config import Environment, Selected, Stream
    from anabranch.iceberg.lake import Lake
    from anabranch.job import Job
    from anabranch.kafka.client import KafkaAdapter

T = TypeVar("T")

ANSWER_SECONDS = 6.0
"""Deadline in seconds of the selection and the answers of many streams. With its start, a command
then answers within 8 s."""

_AT_ONCE = 16
_WORKING_AT_ONCE = 8


@dataclass(frozen=True)
class Many:
    """The selected streams, which share the connections of `catalog`. `unanswered`: errors because
    of which streams of families may be missing; `seconds`: the duration of the selection."""

    environment: Environment
    catalog: Lake
    selected: Selected
    unanswered: tuple[AnabranchError, ...]
    seconds: float


def select(chosen: StreamSelection) -> Many:
    """Read the selected streams' configuration and log to stderr. Raises ConfigurationError."""
    from anabranch import config
    from anabranch.common.logs import configure_logging
    from anabranch.family_streams import select_streams
    from anabranch.iceberg.lake import Lake

    configure_logging()
    began, conf = time.monotonic(), conf_folder()
    environment = config.load_environment(conf)
    unanswered: list[AnabranchError] = []
    selected = select_streams(
        environment, conf, chosen.streams, chosen.group, chosen.every, unanswered
    )
    return Many(
        environment, Lake(environment), selected, tuple(unanswered), time.monotonic() - began
    )


def read_streams(chosen: StreamSelection, read: Callable[[Job, Note], Report[Any]]) -> Result:
    """Read the report of the one named stream, or concurrently those of several streams. A stream
    has an error if none has answered for `ANSWER_SECONDS`."""
    if chosen.one is not None:
        return read(open_stream(chosen.one), lambda waits_for: None)
    many = select(chosen)
    return StreamReports(ask(many, read).items(), many.unanswered)


def run_streams(
    chosen: StreamSelection,
    work: Callable[[Job], Report[Any]],
    ready: Callable[[Job, Note], object] | None = None,
) -> Result:
    """Return the report of each stream's `work`, or its error, in order. `_WORKING_AT_ONCE`
    streams work at a time.

    With several streams, `ready` (by default: load the table) runs first. A stream whose `ready`
    fails has that error and does no work; it has NoAnswer if no stream has answered for
    `ANSWER_SECONDS`. A stream that stops answering later ends with its client's own error.
    """
    if chosen.one is not None:
        with fields(stream=chosen.one):
            return work(open_stream(chosen.one))
    many = select(chosen)
    return StreamReports(run(many, work, ready or load_table), many.unanswered)


def ask(many: Many, read: Callable[[Job, Note], T]) -> dict[str, T | AnabranchError]:
    """Return each stream's result of `read`, or its error; NoAnswer when no stream has answered for
    `ANSWER_SECONDS`: on a small or busy machine, many streams together take longer."""
    from anabranch.common.deadline import ask_all

    with _connections(many.environment) as connect:

        def ask_one(stream: Stream | AnabranchError, note: Note) -> T:
            if isinstance(stream, AnabranchError):
                raise stream
            note(LAKE)
            return read(_job(many, stream, connect()), note)

        asks = {name: partial(ask_one, stream) for name, stream in many.selected.items()}
        limit = max(1.0, ANSWER_SECONDS - many.seconds)
        return ask_all(asks, limit, _AT_ONCE, "stream", since_last_answer=True)


def load_table(job: Job, note: Note) -> None:
    """Load the stream's table, which shows that the catalog and the store answer."""
    job.lake.load(job.stream.table)


def run(
    many: Many, work: Callable[[Job], T], ready: Callable[[Job, Note], object] = load_table
) -> Iterator[tuple[str, T | AnabranchError]]:
    """Yield the result of each stream's `work`, or its error, as `run_streams` does."""
    from anabranch.common import deadline

    names, slots = list(many.selected), threading.Semaphore(_WORKING_AT_ONCE)
    known = ask(many, ready) if len(names) > 1 else {}

    def run_one(name: str) -> T | AnabranchError:
        if isinstance(unready := known.get(name), AnabranchError):
            return unready
        try:
            with slots, fields(stream=name), _opened(many, name) as job:
                return work(job)
        except Exception as error:
            return explain(error)

    # Daemon threads: Ctrl-C does not wait for them.
    working = {name: deadline.start(f"stream-{name}", partial(run_one, name)) for name in names}
    for name, future in working.items():
        yield name, future.result()


@contextmanager
def _opened(many: Many, name: str) -> Iterator[Job]:
    """Open a selected stream's job, with Kafka until the end. Raises the error of its loading."""
    from anabranch.kafka.client import KafkaAdapter

    stream = many.selected[name]
    if isinstance(stream, AnabranchError):
        raise stream
    with KafkaAdapter(many.environment.kafka) as kafka:
        yield _job(many, stream, kafka)


@contextmanager
def _connections(environment: Environment) -> Iterator[Callable[[], KafkaAdapter]]:
    """Provide one connection to Kafka for each calling thread; all are closed at the end."""
    from anabranch.kafka.client import KafkaAdapter

    own, opened = threading.local(), []

    def connect() -> KafkaAdapter:
        if not hasattr(own, "kafka"):
            own.kafka = KafkaAdapter(environment.kafka)
            opened.append(own.kafka)
        kafka: KafkaAdapter = own.kafka
        return kafka

    try:
        yield connect
    finally:
        for kafka in opened:
            kafka.close()


def _job(many: Many, stream: Stream, kafka: KafkaAdapter) -> Job:
    from anabranch.job import Job

    return Job.connect(many.environment, stream, catalog=many.catalog, kafka=kafka)
