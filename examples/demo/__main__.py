"""The demo: events go through Kafka, Spark and S3 into one table, which stays exact while the speed
layer is killed.

Run `make demo`, or with your cluster and catalog `make demo MASTER=spark://…
CATALOG=postgresql+psycopg2://…`. The exit code is 0 only if every acknowledged record is in `main`
exactly once, is a dead letter, or is a duplicate of a row.
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from anabranch.common.errors import Terminal
from anabranch.dev.producers.events import Ack, Sent
from anabranch.dev.producers.produce import STREAM, produce_events
from anabranch.offsets import hours
from anabranch.offsets.position import Offsets, Ranges, clip, ranges_between, size
from anabranch.protocol.state import State, load_state
from demo import audit
from demo.live import Live
from demo.story import Story, poll
from demo.workspace import ExternalServices, Running, Workspace, main, open_workspace

if TYPE_CHECKING:
    from anabranch.job import Job
    from anabranch.operations.reports.status import HourSummary

EVENTS = 30_000
PAST_HOURS = 3
RATE = 200
# Throttled, so that the past hours take the speed layer minutes and it can be killed within one.
THROTTLED = {"trigger": "2 seconds", "max_offsets_per_trigger": 600}
# The speed layer is at the head when the newest event in `main` is younger than this.
FRESH_SECONDS = 10.0
_SECONDS = 600.0

QUESTION = """
SELECT game, count(*) AS purchases, round(sum(amount), 2) AS revenue,
count(DISTINCT player_id) AS players
FROM games.game_events WHERE event_type = 'purchase' GROUP BY game ORDER BY revenue DESC
""".strip().replace("\n", " ")


def run(story: Story, external: ExternalServices) -> None:
    """Run the whole demo. Raises Refused if `main` is not exact at its end."""
    story.title(
        "Events leave Kafka through two arms, speed and batch, and meet again in one exact "
        "Iceberg table."
    )
    story.say(
        "About four minutes, in a temporary folder; Ctrl-C stops it. `make demo VERBOSE=1` prints "
        "every command."
    )
    story.step("A Kafka broker, an S3 server, and three hours of events that wait")
    with open_workspace(story, STREAM, external) as space:
        if external.master is not None:
            story.say(f"The jobs run on {external.master}, each with spark.cores.max: 1")
        if external.catalog is not None:
            address = urlsplit(external.catalog)
            story.say(
                f"The catalog is {address.scheme.partition('+')[0]} at "
                f"{address.hostname}:{address.port}"
            )
        job = space.job(STREAM)
        with job.kafka:
            _Demo(story, space, job).run()


class _Demo:
    def __init__(self, story: Story, space: Workspace, job: Job) -> None:
        self._story, self._space, self._job = story, space, job
        self._live = Live(job, RATE)
        self._past: Sent | None = None

    def run(self) -> None:
        self._begin()
        with self._live.running():
            speed = self._start_speed()
            oldest = self._await_oldest_hour(speed)
            self._accept(oldest)
            self._kill_in_a_past_hour(speed, oldest)
            self._rebuild_alone()
            speed = self._catch_up()
            speed = self._kill_in_the_running_hour(speed)
        self._drain(speed)
        self._end(oldest)

    # Step 1.
    def _begin(self) -> None:
        say, services = self._story.say, self._space.services
        self._story.detail(
            f"Kafka answers at {services.bootstrap_servers}, S3 at {services.s3_endpoint}; the "
            f"folder is {self._space.folder}"
        )
        # The past ends with the last hour whose grace has passed: it can be sealed.
        until = hours.start_of(hours.hour_of(datetime.now(UTC) - self._job.stream.batch.grace))
        began = time.monotonic()
        with self._story.awaiting("sending events") as show:
            count = 0

            def on_ack(ack: Ack) -> None:
                nonlocal count
                count += 1
                if count % 500 == 0:
                    show(f"{count:,} acknowledged")

            self._past = sent = produce_events(
                self._job.environment.kafka,
                self._job.stream.topic,
                events=EVENTS,
                hours=PAST_HOURS,
                until=until,
                dirty=True,
                on_ack=on_ack,
            )
        _require_all_acknowledged(sent)
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sent.sent.items())
        say(
            f"Kafka acknowledged {sent.acknowledged:,} records in {time.monotonic() - began:.1f} "
            f"s: {kinds}"
        )
        self._story.detail(
            f"Their Kafka timestamps lie in the hours {', '.join(sent.by_hour())} (UTC)"
        )
        made = self._space.run("apply", STREAM, show=False).splitlines()
        if not self._story.is_brief:
            self._story.output("\n".join(line for line in made if "created branch" not in line))
        self._story.detail(
            "Each table has the branches speed, batch, and main, which analysts query"
        )

    # Step 2.
    def _start_speed(self) -> Running:
        self._story.step(
            f"The speed layer reads the past hours, beside {RATE} live events a second"
        )
        self._story.detail(
            f"Limited to {THROTTLED['max_offsets_per_trigger']} offsets every "
            f"{THROTTLED['trigger']}, or it would be done before we can break it"
        )
        self._space.set_speed(STREAM, **THROTTLED)
        return self._start()

    def _start(self) -> Running:
        self._story.command(("speed", STREAM, "&"))
        return self._space.start("speed", STREAM)

    def _await_oldest_hour(self, speed: Running) -> str:
        began = time.monotonic()
        started = False
        with self._story.awaiting("the speed layer starts") as show:

            def well_into_the_oldest() -> str | None:
                nonlocal started
                state = self._state()
                parts = rest_of(_by_hour(state), state.position.offsets)
                # The first rows are published with the ends of the past hours.
                if not parts:
                    show(f"{time.monotonic() - began:.0f} s")
                    return None
                if not started:
                    started = True
                    self._story.detail(
                        f"First rows in main {time.monotonic() - began:.0f} s after its start, "
                        "JVM included"
                    )
                show(_progress(parts, state.position.offsets))
                hour, whole, rest = parts[0]
                return hour if size(rest) < 0.6 * size(whole) else None

            oldest = poll(
                well_into_the_oldest,
                "the speed layer to read the oldest hour",
                _SECONDS,
                speed.require_alive,
            )
        self._story.say(
            f"Nearly half of hour {oldest} is in main, served by the speed layer; it reads on"
        )
        return oldest

    # Step 3.
    def _accept(self, oldest: str) -> None:
        self._story.step(
            f"Beside it the batch layer proves the oldest hour, {oldest}, and takes it over"
        )
        self._space.run("batch", STREAM, "--hour", oldest, show=not self._story.is_brief)
        view = self._hours()[oldest]
        if view.served != "batch" or view.diff is None:
            raise Terminal(
                f"hour {oldest}: expected main to serve it from batch, found {view.served}"
            )
        self._story.say(
            f"main serves {oldest} from batch now, {view.counts.duplicate:,} duplicates left out. "
            f"Of its rows the speed layer had {view.speed_rows:,} when they were compared: "
            f"{view.diff.missing:,} missing so far, {view.diff.extra} extra, {view.diff.changed} "
            "changed"
        )

    # Step 4.
    def _kill_in_a_past_hour(self, speed: Running, oldest: str) -> None:
        self._story.step("kill -9 for the speed layer, in the middle of an hour")
        with self._story.awaiting("the middle of an hour") as show:

            def in_the_middle() -> bool | None:
                state = self._state()
                parts = rest_of(_by_hour(state), state.position.offsets)
                show(_progress(parts, state.position.offsets))
                waiting = [(hour, size(rest) / size(whole)) for hour, whole, rest in parts if rest]
                # No hour is waiting if the speed layer read all of them during a slow batch run.
                if not waiting or (waiting[0][0] > oldest and 0.1 < waiting[0][1] < 0.9):
                    return True
                return None

            poll(
                in_the_middle,
                "the speed layer to be in the middle of an hour",
                _SECONDS,
                speed.require_alive,
            )
        self._kill(speed)
        state = self._state()
        for hour, whole, rest in rest_of(_by_hour(state), state.position.offsets):
            published = size(whole) - size(rest)
            if not rest:
                words = (
                    f"all of its {size(whole):,} offsets are in main"
                    if size(whole)
                    else "it has no records"
                )
            elif published:
                words = f"{published:,} of its {size(whole):,} offsets are in main, the rest is not"
            else:
                words = f"none of its {size(whole):,} offsets is in main"
            self._story.detail(f"Hour {hour}: {words}")

    def _kill(self, speed: Running) -> None:
        killed = speed.kill()
        self._story.say(
            f"Killed its processes {', '.join(map(str, killed))}: the JVM and its Python", "red"
        )
        # Read after the kill: the last publish may have succeeded until the end.
        position = self._state().position.offsets
        self._story.say(f"The table's position is {_words(position)}: that is the only state")
        checkpoints = self._space.checkpoints()
        for checkpoint in checkpoints:
            shutil.rmtree(checkpoint)
        self._story.say(
            "Deleted every checkpoint: "
            f"{', '.join(c.name for c in checkpoints) or 'there was none'}"
        )
        self._story.detail(
            f"Events go on: {self._live.count():,} acknowledged in the running hour so far"
        )

    # Step 5.
    def _rebuild_alone(self) -> None:
        self._story.step(
            "No speed layer is alive; the batch layer rebuilds the hours that are left, from Kafka"
        )
        self._space.run("batch", STREAM, show=False)
        if not self._story.is_brief:
            self._space.run("hours", STREAM)
        if waiting := self._state().timeline.sealed:
            raise Terminal(
                f"hours {', '.join(sorted(waiting))}: expected them to be accepted, found them "
                "waiting"
            )
        self._story.say("Every hour that has ended is whole in main, served by batch")

    # Step 6.
    def _catch_up(self) -> Running:
        self._story.step(
            "The speed layer is back, with the speed that ships, and without a checkpoint"
        )
        self._space.set_speed(STREAM)
        behind = self._lag()
        speed = self._start()
        began = time.monotonic()
        age = self._await_head(speed)
        for event in speed.events():
            if event.endswith("covered by the batch layer"):
                self._story.detail(f"Its log: {event.split('}: ')[-1]}; so it skipped them")
        self._story.say(
            f"{behind:,} offsets behind at its start, {time.monotonic() - began:.0f} s later at "
            f"the head: the newest event in main is {age:.1f} s old"
        )
        return speed

    def _await_head(self, speed: Running) -> float:
        began = self._newest()
        with self._story.awaiting("the head") as show:

            def fresh() -> float | None:
                newest = self._newest()
                age = (datetime.now(UTC) - newest).total_seconds() if newest else None
                show(f"{self._lag():,} offsets behind")
                return age if newest != began and age is not None and age < FRESH_SECONDS else None

            return poll(fresh, "the speed layer to be at the head", _SECONDS, speed.require_alive)

    # Step 7.
    def _kill_in_the_running_hour(self, speed: Running) -> Running:
        self._story.step(
            "Once more kill -9, in the running hour, in the middle of whatever it was doing"
        )
        self._kill(speed)
        speed = self._start()
        age = self._await_head(speed)
        self._story.say(f"At the head again: the newest event in main is {age:.1f} s old")
        return speed

    def _drain(self, speed: Running) -> None:
        _require_all_acknowledged(self._live.sent)
        self._story.detail(f"The events end: {self._live.sent.acknowledged:,} were sent live")
        with self._story.awaiting("the last events") as show:

            def drained() -> bool | None:
                lag = self._lag()
                show(f"{lag:,} offsets behind")
                return True if lag == 0 else None

            poll(drained, "the lag to be 0", _SECONDS, speed.require_alive)
        code = speed.terminate()
        if code != 0:
            raise Terminal(
                f"speed: expected exit code 0 after SIGTERM, found {code}:\n{speed.log_tail(15)}"
            )
        left = self._space.checkpoints()
        self._story.detail(
            f"Lag 0. SIGTERM: it ended between two micro-batches, exit code 0, {len(left)} "
            "checkpoints left"
        )

    # The end.
    def _end(self, hour: str) -> None:
        self._story.step("Served hours, by layer")
        self._served_by_hour()
        self._story.detail("")
        self._space.run("query", QUESTION)
        self._story.step("Is an hour complete, and how do you know?")
        if not self._story.is_brief:
            self._space.run("explain", STREAM, hour)
        audited = self._space.run("audit", STREAM, show=not self._story.is_brief)
        if self._story.is_brief:
            self._story.output(audited.splitlines()[-1])
        self._story.step(
            "Every record that Kafka acknowledged against main, by partition, offset and content"
        )
        assert self._past is not None
        audit.run_audit(
            self._story,
            self._job,
            [*self._past.acks, *self._live.sent.acks],
            audit.game_event_as_sent,
        )

    def _served_by_hour(self) -> None:
        table, letters = (
            self._job.lake.load(n)
            for n in (self._job.stream.table, self._job.stream.dead_letters_table)
        )
        rows, dead = (
            Counter(t.scan(selected_fields=("ingest_hour",)).to_arrow()["ingest_hour"].to_pylist())
            for t in (table, letters)
        )
        views, state = self._hours(), self._state()
        lines = []
        for hour in sorted({*rows, *dead, *views}):
            view = views.get(hour)
            known = (
                (view.state, view.revision or "", view.counts.duplicate)
                if view
                else ("not sealed", "", None)
            )
            name, revision, duplicate = known
            cells = (rows.get(hour, 0), dead.get(hour, 0), "" if duplicate is None else duplicate)
            lines.append((hour, name, state.served_by(hour), revision, *cells))
        self._story.table(
            ("hour", "state", "served by", "revision", "rows", "dead letters", "duplicates"), lines
        )

    # Reads of the table.
    def _state(self) -> State:
        return load_state(self._job.lake, self._job.stream.table)

    def _hours(self) -> dict[str, HourSummary]:
        from anabranch.operations.reports import status

        return {view.hour: view for view in status.hours(self._job)}

    def _lag(self) -> int:
        from anabranch.operations.reports import status

        return status.status(self._job).lag.offsets

    def _newest(self) -> datetime | None:
        """Return the newest Kafka timestamp in `main`, of the current and the previous hour."""
        since = hours.hour_of(datetime.now(UTC) - timedelta(hours=1))
        table = self._job.lake.load(self._job.stream.table)
        scan = table.scan(
            row_filter=f"ingest_hour >= '{since}'", selected_fields=("kafka_timestamp",)
        )
        return max(scan.to_arrow()["kafka_timestamp"].to_pylist(), default=None)


def _require_all_acknowledged(sent: Sent) -> None:
    if sent.failed:
        raise Terminal(
            f"expected every send to be acknowledged, found {sent.failed} failed: "
            f"{sent.first_error}"
        )


def _by_hour(state: State) -> dict[str, Ranges]:
    """Return the ranges of the hours with a known end, sealed or not, oldest first."""
    ranges = {hour: cut.ranges for hour, cut in sorted(state.cuts.items())}
    start = dict(state.timeline.start)
    for hour, ends in sorted(state.timeline.boundaries.items()):
        ranges[hour] = ranges_between(start, ends)
        start |= ends
    return ranges


def rest_of(by_hour: Mapping[str, Ranges], position: Offsets) -> list[tuple[str, Ranges, Ranges]]:
    """Return each hour with its ranges, and their part from the position on."""
    return [
        (
            hour,
            ranges,
            clip(ranges, {p: (position.get(p, 0), end) for p, (_, end) in ranges.items()}),
        )
        for hour, ranges in by_hour.items()
    ]


def _progress(parts: Iterable[tuple[str, Ranges, Ranges]], position: Offsets) -> str:
    for hour, whole, rest in parts:
        if rest:
            return (
                f"in hour {hour}, {size(whole) - size(rest):,} of {size(whole):,} offsets are in "
                "main"
            )
    return f"at {_words(position)}"


def _words(position: Offsets) -> str:
    return ", ".join(f"{partition}:{offset:,}" for partition, offset in sorted(position.items()))


@click.command()
@click.option(
    "--verbose", is_flag=True, help="Print the output of every command; without it, one screen."
)
@click.option(
    "--master",
    metavar="URL",
    help="Spark master of a cluster with workers on this machine, where Kafka and S3 run.",
)
@click.option(
    "--catalog", metavar="URI", help="As catalog.uri. The demo drops its tables there at its end."
)
def command(verbose: bool, master: str | None, catalog: str | None) -> None:
    """Run both layers through kills on real services, and compare every record at the end."""
    sys.exit(
        main(
            functools.partial(run, external=ExternalServices(master or None, catalog or None)),
            is_brief=not verbose,
        )
    )


if __name__ == "__main__":
    command()
