"""Commands on several streams: the selection, and concurrent reading of the streams."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from anabranch.cli.watching import watched
from anabranch.common.errors import AnabranchError
from anabranch.common.logs import fields

if TYPE_CHECKING:
    from datetime import timedelta

    from anabranch.cli.options import StreamSelection
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


def select(chosen: StreamSelection, conf: str | None) -> Many:
    """Read the configuration of the selected streams, and log to standard error. Raises
    ConfigurationError."""
    from anabranch import config
    from anabranch.common.logs import configure_logging
    from anabranch.family_streams import select_streams
    from anabranch.iceberg.lake import Lake

    configure_logging()
    began = time.monotonic()
    environment = config.load_environment(conf)
    unanswered: list[AnabranchError] = []
    selected = select_streams(
        environment, conf, chosen.streams, chosen.group, chosen.every, unanswered
    )
    return Many(
        environment, Lake(environment), selected, tuple(unanswered), time.monotonic() - began
    )


def ask(
    many: Many, read: Callable[[Job, Note], T], since_last_answer: bool = False
) -> dict[str, T | AnabranchError]:
    """Return each stream's result of `read`, or its error; NoAnswer after `ANSWER_SECONDS`, with
    `since_last_answer` counted from the last answer of any stream."""
    from anabranch.common.deadline import ask_all

    with _connections(many.environment) as connect:

        def ask_one(stream: Stream | AnabranchError, note: Note) -> T:
            if isinstance(stream, AnabranchError):
                raise stream
            return read(_job(many, stream, connect()), note)

        asks = {name: partial(ask_one, stream) for name, stream in many.selected.items()}
        return ask_all(
            asks, max(1.0, ANSWER_SECONDS - many.seconds), _AT_ONCE, "stream", since_last_answer
        )


def load_table(job: Job, note: Note) -> None:
    """Load the stream's table, which shows that the catalog and the store answer."""
    from anabranch.common.deadline import LAKE

    note(LAKE)
    job.lake.load(job.stream.table)


def run(
    many: Many, ready: Callable[[Job, Note], object], work: Callable[[Job], T]
) -> Iterator[tuple[str, Callable[[], T]]]:
    """Run `work` for each stream, `_WORKING_AT_ONCE` at a time. Yield each stream's name, in order,
    and a call that waits for its result and returns it, or raises its error.

    With several streams, `ready` runs first. A stream whose `ready` fails raises that error and
    does no work; it raises NoAnswer if no stream has answered for `ANSWER_SECONDS`. A stream that
    stops answering later ends with its client's own error.
    """
    from anabranch.common import deadline

    names, slots = list(many.selected), threading.Semaphore(_WORKING_AT_ONCE)
    known = ask(many, ready, since_last_answer=True) if len(names) > 1 else {}
    unready = {name: answer for name, answer in known.items() if isinstance(answer, AnabranchError)}

    def run_one(name: str) -> T:
        if name in unready:
            raise unready[name]
        with slots, fields(stream=name), opened(many, name) as job:
            return work(job)

    # Daemon threads: Ctrl-C does not wait for them.
    working = {name: deadline.start(f"stream-{name}", partial(run_one, name)) for name in names}
    for name, future in working.items():
        yield name, future.result


@contextmanager
def opened(many: Many, name: str) -> Iterator[Job]:
    """Open a selected stream's job; its connection to Kafka is closed at the end. Raises the error
    of a stream that could not be loaded."""
    from anabranch.kafka.client import KafkaAdapter

    stream = many.selected[name]
    if isinstance(stream, AnabranchError):
        raise stream
    with KafkaAdapter(many.environment.kafka) as kafka:
        yield _job(many, stream, kafka)


def report_errors(many: Many, answers: Mapping[str, object]) -> int:
    """Print the errors of families, and of streams without an answer, to standard error. Return the
    exit code of the first, or 0."""
    errors = [
        *many.unanswered,
        *(answer for answer in answers.values() if isinstance(answer, AnabranchError)),
    ]
    for error in errors:
        click.echo(f"anabranch: {error}", err=True)
    return errors[0].exit_code if errors else 0


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


def watch_all(
    chosen: StreamSelection,
    conf: str | None,
    watch: bool,
    interval: timedelta,
    read: Callable[[Job, Note], T],
    show: Callable[[dict[str, T | AnabranchError]], bool],
) -> NoReturn:
    """Read streams concurrently, once or repeatedly, and end the command. `show` prints the
    answers, and returns whether one of them is a reason for exit code 1."""
    selected, code = select(chosen, conf), 0

    def show_all(found: dict[str, T | AnabranchError]) -> None:
        nonlocal code
        is_wrong = show(found)
        code = report_errors(selected, found) or int(is_wrong)

    watched(watch, interval, lambda: ask(selected, read), show_all)
    sys.exit(0 if watch else code)
