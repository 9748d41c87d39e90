"""`anabranch dev`: services and producers on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import click

from anabranch.cli.options import conf_folder
from anabranch.cli.report import Event, Text, local_report, report, table_of

if TYPE_CHECKING:
    from anabranch.dev.services import ServiceStatus

_home = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".anabranch"),
    help="Folder of the services' data and logs.",
)
_port = click.IntRange(1, 65535)


@click.group()
def dev() -> None:
    """Run Kafka and S3 on this machine; send test records."""


@dev.command()
@_home
@click.option(
    "--kafka-port", type=_port, help="Kafka's port.  [default: the previous one, else 19092]"
)
@click.option(
    "--s3-port", type=_port, help="The S3 server's port.  [default: the previous one, else 19000]"
)
@local_report
def up(home: Path, kafka_port: int | None, s3_port: int | None) -> Event[object]:
    """Start Kafka and S3.

    \b
    anabranch dev up

    Starts the one that does not run, and prints both. They run until 'anabranch dev down'.
    """
    from anabranch.dev import services

    # On SIGTERM, stop the services that were started, as on Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    running = services.up(services.Home(home), kafka_port, s3_port, progress=_progress)
    states = services.status(running.home)
    lines = [*_services_text(states)]
    if not running.started:
        lines.append("Already up.")
    for name, value, shipped in (
        ("ANABRANCH_KAFKA", running.bootstrap_servers, f"127.0.0.1:{services.KAFKA_PORT}"),
        ("ANABRANCH_S3", running.s3_endpoint, f"http://127.0.0.1:{services.S3_PORT}"),
    ):
        if os.environ.get(name, shipped) != value:
            lines.append(f"For conf/anabranch.yaml as it ships: export {name}={value}")
    return Event({"services": states, "started": running.started}, lines)


@dev.command()
@_home
@click.option("--wipe", is_flag=True, help="Also remove their data, logs and the embedded catalog.")
@local_report
def down(home: Path, wipe: bool) -> Event[object]:
    """Stop Kafka and S3, if they run.

    \b
    anabranch dev down --wipe
    """
    from anabranch.dev import services

    stopped = services.down(services.Home(home), wipe, _progress)
    lines = [f"Stopped: {', '.join(stopped)}." if stopped else "Nothing was running."]
    lines += ["Data, logs and embedded catalog removed."] if wipe else []
    return Event({"stopped": stopped, "wiped": wipe}, lines)


def _topic_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", value) or value in (".", ".."):
        raise click.BadParameter(
            f"expected 1 to 249 of A-Z, a-z, 0-9, dot, underscore and hyphen, found {value!r}"
        )
    return value


@dev.command()
@click.argument("name", callback=_topic_name)
@click.option("--partitions", type=click.IntRange(min=1), default=3, help="Number of partitions.")
@report
def topic(name: str, partitions: int) -> Event[object]:
    """Create a topic, if it does not exist.

    \b
    anabranch dev topic shop.orders --partitions 3
    """
    from anabranch import config
    from anabranch.kafka.client import KafkaAdapter

    with KafkaAdapter(config.load_environment(conf_folder()).kafka) as kafka:
        created = kafka.create_topic(name, partitions, {})
        found = kafka.describe(name)
        there = len(found.partitions) if found is not None else 0
    word = "created" if created else "is there already,"
    return Event(
        {"topic": name, "created": created, "partitions": there},
        [f"topic {name} {word} with {there} partition{'s' if there != 1 else ''}"],
    )


@dev.command()
@click.argument("stream")
@click.option(
    "--events",
    type=click.IntRange(min=1),
    required=True,
    help="Number of events; --dirty adds records.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Records per second.  [default: unlimited]",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0),
    default=0,
    help="Spread the Kafka timestamps over the last HOURS; 0: the time of sending.",
)
@click.option("--seed", type=int, default=1, help="Seed of the random events.")
@click.option(
    "--dirty",
    is_flag=True,
    help="Make 1 in 100 events late, send 1 in 100 twice, add 1 malformed record per 100.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=3,
    help="Number of partitions, if the topic is created.",
)
@click.option(
    "--acks",
    type=click.File("a", encoding="utf-8"),
    metavar="FILE",
    help="Append one JSON line for each acknowledged record: partition, offset, kind, sha256, "
    "timestamp_ms.",
)
@report
def produce(
    stream: str,
    events: int,
    rate: float | None,
    hours: float,
    seed: int,
    dirty: bool,
    partitions: int,
    acks: IO[str] | None,
) -> Iterator[Event[object]]:
    """Send seeded, realistic game events to Kafka.

    \b
    anabranch dev produce game_events --events 1000 --hours 2 --dirty

    Prints the number of sent and acknowledged records; the exit code is 75 if one was not
    acknowledged. Ctrl-C flushes, and prints the numbers so far.
    """
    from anabranch import config
    from anabranch.common.errors import ConfigurationError
    from anabranch.dev.producers import produce as producing
    from anabranch.dev.producers.events import KINDS, Ack

    if stream != producing.STREAM:
        raise ConfigurationError(
            f"dev produce: expected {producing.STREAM}, the one stream whose events it can make "
            f"up, found {stream!r}. Send records of your own to another topic: 'anabranch dev send "
            "TOPIC FILE'."
        )
    topic = config.load_stream(stream, conf_folder()).topic
    kafka = config.load_environment(conf_folder()).kafka
    began = time.monotonic()

    def on_ack(ack: Ack) -> None:
        if acks is not None:
            acks.write(json.dumps(ack._asdict()) + "\n")

    with producing.stopped_by_signals() as (stop, signals):
        sent = producing.produce_events(
            kafka,
            topic,
            events=events,
            rate=rate,
            hours=hours,
            seed=seed,
            dirty=dirty,
            partitions=partitions,
            stop=stop,
            on_ack=on_ack,
        )
    view = {
        "stream": stream,
        "topic": sent.topic,
        "sent": {kind: sent.sent[kind] for kind in KINDS},
        "acknowledged": sent.acknowledged,
        "failed": sent.failed,
        "by_hour": sent.by_hour(),
    }
    text = _sent_text(view, time.monotonic() - began)
    yield Event(view, text, exit_code=128 + signals[0] if signals else 0)
    if not signals:
        producing.require_acknowledged(f"dev produce {stream}", sent)


def _sent_text(view: Mapping[str, Any], seconds: float) -> Text:
    """Return the sent records by kind, and the acknowledged ones by hour."""
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in view["sent"].items() if n)
    total = sum(view["sent"].values())
    yield (
        f"{view['stream']}: sent {total:,} records to topic {view['topic']} in {seconds:.1f} s: "
        f"{kinds or 'nothing'}"
    )
    yield f"acknowledged {view['acknowledged']:,} of {total:,}, failed {view['failed']:,}"
    yield table_of({"hour": hour, **counts} for hour, counts in view["by_hour"].items())


@dev.command()
@click.argument("topic", callback=_topic_name)
@click.argument("file", type=click.File("rb"))
@report
def send(topic: str, file: IO[bytes]) -> Event[object]:
    """Send the lines of FILE as records to a topic.

    \b
    anabranch dev send shop.orders orders.jsonl

    FILE - is standard input. A record has the line as its value, no key, and the time of sending as
    its timestamp; blank lines are skipped. Every record is acknowledged when the command ends.
    """
    from anabranch import config
    from anabranch.dev.producers.produce import send_lines

    sent = send_lines(config.load_environment(conf_folder()).kafka, topic, file)
    words = f"topic {topic}: {sent:,} record{'s' if sent != 1 else ''} sent and acknowledged"
    return Event({"topic": topic, "acknowledged": sent}, [words])


def _progress(message: str) -> None:
    click.echo(message, err=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def _services_text(states: tuple[ServiceStatus, ...]) -> Iterator[str]:
    for state in states:
        details = [state.endpoint, f"pid {state.pid}" if state.pid else None, f"log {state.log}"]
        if state.since:
            details.append(f"since {state.since:%Y-%m-%dT%H:%M:%SZ}")
        yield f"{state.service:<6} {state.state:<13} {', '.join(filter(None, details))}"
