"""`anabranch dev`: the services on this machine, from the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from anabranch.dev.services import ServiceStatus

_LATER = {"produce": ("anabranch.dev.producers.produce", "produce")}


class LazyGroup(click.Group):
    """Imports a command's module only when the command is asked for, so that `--help` elsewhere stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(name for name, (module, _) in _LATER.items() if _exists(module))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LATER and _exists(_LATER[cmd_name][0]):
            module, name = _LATER[cmd_name]
            command = getattr(importlib.import_module(module), name)
            assert isinstance(command, click.Command)
            return command
        return super().get_command(ctx, cmd_name)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


_home = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".anabranch"),
    show_default=True,
    help="Folder of the services' data, logs and pid files.",
)
_output = click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
_conf = click.option("--conf", metavar="DIR", help="Configuration folder (ANABRANCH_CONF, else conf).")
_port = click.IntRange(1, 65535)


@click.group(cls=LazyGroup)
def dev() -> None:
    """Run Kafka and S3 on this machine; send test records."""


@dev.command()
@_home
@click.option("--kafka-port", type=_port, help="Kafka's port.  [default: the one it had, else 19092]")
@click.option("--s3-port", type=_port, help="The S3 server's port.  [default: the one it had, else 19000]")
@_output
def up(home: Path, kafka_port: int | None, s3_port: int | None, output: str) -> None:
    """Start Kafka and S3, or whichever of them does not run.

    They go on after this command, until 'anabranch dev down'.
    """
    from anabranch.dev import services

    # Terminated half-way, it stops what it has started, as with Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    running = services.up(services.Home(home), kafka_port, s3_port, progress=_progress)
    states = services.status(running.home)
    if output == "json":
        _print_json(states, started=list(running.started))
        return
    _print_text(states)
    if not running.started:
        click.echo("Already up.")
    for name, value, shipped in (
        ("ANABRANCH_KAFKA", running.bootstrap_servers, f"127.0.0.1:{services.KAFKA_PORT}"),
        ("ANABRANCH_S3", running.s3_endpoint, f"http://127.0.0.1:{services.S3_PORT}"),
    ):
        if value != shipped and os.environ.get(name) != value:
            click.echo(f"For conf/anabranch.yaml as it ships: export {name}={value}")


@dev.command()
@_home
@click.option("--wipe", is_flag=True, help="Remove their data, logs and the embedded catalog as well.")
@_output
def down(home: Path, wipe: bool, output: str) -> None:
    """Stop Kafka and S3; fine if nothing runs."""
    from anabranch.dev import services

    stopped = services.down(services.Home(home), wipe, _progress)
    if output == "json":
        click.echo(json.dumps({"stopped": list(stopped), "wiped": wipe}))
        return
    click.echo(f"Stopped: {', '.join(stopped)}." if stopped else "Nothing was running.")
    if wipe:
        click.echo("Data, logs and embedded catalog removed.")


@dev.command()
@_home
@_output
@click.pass_context
def status(ctx: click.Context, home: Path, output: str) -> None:
    """Ask Kafka and S3 whether they run; exit code 1 unless both do."""
    from anabranch.dev import services

    states = services.status(services.Home(home))
    if output == "json":
        _print_json(states)
    else:
        _print_text(states)
        if any(state.state != "running" for state in states):
            click.echo("Start what is missing with: anabranch dev up")
    ctx.exit(0 if all(state.state == "running" for state in states) else 1)


def _topic_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", value) or value in (".", ".."):
        raise click.BadParameter(f"expected 1 to 249 of A-Z, a-z, 0-9, dot, underscore and hyphen, found {value!r}")
    return value


@dev.command()
@click.argument("name", callback=_topic_name)
@click.option("--partitions", type=click.IntRange(min=1), default=3, show_default=True, help="How many it gets.")
@_conf
@_output
def topic(name: str, partitions: int, conf: str | None, output: str) -> None:
    """Create a topic; fine if it is there."""
    from anabranch import config
    from anabranch.kafka.client import KafkaAdapter

    with KafkaAdapter(config.load_environment(conf).kafka) as kafka:
        created = kafka.create_topic(name, partitions, {})
        found = kafka.describe(name)
        there = len(found.partitions) if found is not None else 0
    if output == "json":
        click.echo(json.dumps({"topic": name, "created": created, "partitions": there}))
        return
    word = "created" if created else "is there already,"
    click.echo(f"topic {name} {word} with {there} partition{'s' if there != 1 else ''}")


@dev.command()
@click.argument("topic", callback=_topic_name)
@click.argument("file", type=click.File("rb"))
@_conf
@_output
def send(topic: str, file: IO[bytes], conf: str | None, output: str) -> None:
    """Send each line of FILE as a record to a topic.

    FILE - is standard input. A record has the line as its value, no key, and the time of its send as its timestamp;
    blank lines are left out. Every record is acknowledged when the command ends.
    """
    from anabranch import config
    from anabranch.dev.producers.send import send_lines

    sent = send_lines(config.load_environment(conf).kafka, topic, file)
    if output == "json":
        click.echo(json.dumps({"topic": topic, "acknowledged": sent}))
    else:
        click.echo(f"topic {topic}: {sent:,} record{'s' if sent != 1 else ''} sent and acknowledged")


def _progress(message: str) -> None:
    click.echo(message, err=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def _print_text(states: tuple[ServiceStatus, ...]) -> None:
    for state in states:
        details = [state.endpoint, f"pid {state.pid}" if state.pid else None, f"log {state.log}"]
        if state.since:
            details.append(f"since {state.since:%Y-%m-%dT%H:%M:%SZ}")
        click.echo(f"{state.service:<6} {state.state:<13} {', '.join(filter(None, details))}")


def _print_json(states: tuple[ServiceStatus, ...], **more: Any) -> None:
    services = [
        {
            "service": state.service,
            "state": state.state,
            "pid": state.pid,
            "endpoint": state.endpoint,
            "since": state.since.isoformat().replace("+00:00", "Z") if state.since else None,
            "log": str(state.log),
        }
        for state in states
    ]
    click.echo(json.dumps({"services": services, **more}))
