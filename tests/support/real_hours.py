"""Hours of very many micro-batches, with Kafka, S3, both layers and maintenance as processes.

Records have timestamps of past hours. A proxy counts the speed layer's requests of S3.
"""

import math
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import yaml
from demo import audit
from demo.story import Story, poll
from demo.workspace import Running, Workspace, open_workspace
from flaky_s3 import FlakyS3, running_flaky_s3

from anabranch.common.output import plain
from anabranch.dev.producers.events import Ack
from anabranch.dev.producers.produce import STREAM, produce_events
from anabranch.dev.services.processes import HOST
from anabranch.iceberg.manifests import content_by_hour, list_manifests
from anabranch.iceberg.snapshots import head
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, shift, start_of
from anabranch.offsets.position import size
from anabranch.operations.reports import status as views
from anabranch.protocol.state import State, load_state

# The most offsets that a micro-batch reads; the partitions of the topic.
OFFSETS, PARTITIONS = 30, 3
# An hour's records are sent in slices. In every fifth slice, about one micro-batch in three has a
# dead letter, a late record of another event date, and a duplicate. So each tenth of an hour has
# some of them.
_SLICES, _DIRTY = 60, 5
# The most files that a reader of the running hour may have to open.
MOST_FILES = 100
# How often a publisher may be refused before its turn lets it succeed.
MOST_REFUSALS = 3

_PUBLISHED = re.compile(r"published (\d+) offsets as .* of hour ([^ ]+(?:, [^ ]+)*) in ([\d.]+) s$")
_REFUSED = re.compile(r"publish refused because a head of")
_SECONDS = 4 * 3600.0
# A look reads a dozen files; a shorter interval would affect the measurement.
_LOOK_EVERY_SECONDS = 3.0


@dataclass(frozen=True)
class MicroBatch:
    """A publish of the speed layer, as logged. `seconds`: from decision to end of commit."""

    offsets: int
    hours: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Look:
    """Publishes and costs since the speed layer's last start; files a reader would open."""

    start: int
    micro_batches: int
    hour: str
    files: int
    manifests: int
    metadata_bytes: int
    requests: int
    cpu: Mapping[str, float]


@dataclass(frozen=True)
class Window:
    """The cost per micro-batch of consecutive ones of one hour and process: S3 requests, CPU seconds
    of the Python driver and of the JVM, and the median of the wall seconds."""

    first: int
    last: int
    requests: float
    python: float
    jvm: float
    seconds: float


class Start:
    """One start of the speed layer, and its log, of which only new lines are read."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._read = 0
        self._found: list[MicroBatch] = []

    def micro_batches(self) -> list[MicroBatch]:
        """Return the publishes so far."""
        with self.running.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.decode("utf-8", "replace").splitlines()
        matches = map(_PUBLISHED.search, lines)
        found = [(m[1], m[2].split(", "), m[3]) for m in matches if m is not None]
        self._found += [MicroBatch(int(n), tuple(of), float(took)) for n, of, took in found]
        return self._found


class RealHours:
    """One stream in its own workspace, with the actions of a producer and an operator."""

    def __init__(self, space: Workspace, job: Job, front: FlakyS3) -> None:
        self.space, self.job, self._front = space, job, front
        # The newest hour that can be sealed.
        self.newest = shift(hour_of(datetime.now(UTC) - job.stream.batch.grace), -1)
        self.acks: list[Ack] = []
        self.starts: list[Start] = []
        self.looks: list[Look] = []
        self._metered = space.folder / "conf-metered"
        self._before = 0

    def send(self, hour: str, micro_batches: int) -> None:
        """Send the records of micro-batches with timestamps in the hour; oldest hours first."""
        events = math.ceil(micro_batches * OFFSETS / _SLICES)
        for number in range(_SLICES):
            sent = produce_events(
                self.job.environment.kafka,
                self.job.stream.topic,
                events=events,
                seed=len(self.acks),
                dirty=number % _DIRTY == _DIRTY // 2,
                partitions=PARTITIONS,
                hours=1 / _SLICES,
                until=start_of(hour) + timedelta(hours=1) * (number + 1) / _SLICES,
            )
            assert not sent.failed, sent.first_error
            self.acks += sent.acks

    def apply(self) -> None:
        """Create the tables; maintenance drops the speed layer's rows of accepted hours at once."""
        self.space.set_speed(STREAM, trigger="0 seconds", max_offsets_per_trigger=OFFSETS)
        file = self.space.conf / "streams" / f"{STREAM}.yaml"
        stream = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(stream | {"maintain": {"speed_hours": "0 seconds"}}))
        shutil.copytree(self.space.conf, self._metered)
        environment = yaml.safe_load((self.space.conf / "anabranch.yaml").read_text())
        environment["s3"]["endpoint"] = f"http://{HOST}:{self._front.port}"
        (self._metered / "anabranch.yaml").write_text(yaml.safe_dump(environment))
        self.space.run("apply", STREAM, show=False)

    @property
    def speed(self) -> Running:
        """The last start of the speed layer."""
        return self.starts[-1].running

    def start_speed(self) -> None:
        """Start the speed layer with the proxy that counts its S3 requests."""
        log = f"speed-{len(self.starts) + 1}"
        self._before = self._front.methods.total()
        running = self.space.start("speed", STREAM, log=log, ANABRANCH_CONF=str(self._metered))
        self.starts.append(Start(running))

    @property
    def state(self) -> State:
        return load_state(self.job.lake, self.job.stream.table)

    @property
    def lag(self) -> int:
        """The number of acknowledged offsets that the speed layer has not published."""
        offsets = self.state.position.offsets
        ends: dict[int, int] = {}
        for ack in self.acks:
            ends[ack.partition] = max(ends.get(ack.partition, 0), ack.offset + 1)
        return size({p: (offsets.get(p, 0), end) for p, end in ends.items()})

    def micro_batches(self, hour: str | None = None) -> list[MicroBatch]:
        """Return the publishes of all starts of the speed layer, of one hour or all."""
        every = [m for start in self.starts for m in start.micro_batches()]
        return [m for m in every if hour is None or hour in m.hours]

    def look(self) -> Look:
        """Look at the stream, and keep the result."""
        table = self.job.lake.load(self.job.stream.table)
        start = self.starts[-1]
        published = start.micro_batches()
        hour = published[-1].hours[-1] if published else self.state.timeline.open
        content = content_by_hour(table, "main", (hour,)).get(hour)
        seen = Look(
            start=len(self.starts),
            micro_batches=len(published),
            hour=hour,
            files=content.files if content is not None else 0,
            manifests=len(list_manifests(table, head(table, "main"))[0]),
            metadata_bytes=len(table.io.new_input(table.metadata_location)),
            requests=self._front.methods.total() - self._before,
            cpu=_cpu(start.running),
        )
        self.looks.append(seen)
        return seen

    def until(self, condition: Callable[[], bool], what: str, *alive: Running) -> None:
        """Wait, and look at the stream meanwhile. Terminal if a process of `alive` ends."""
        due = 0.0

        def check() -> None:
            for running in alive:
                running.require_alive()

        def ask() -> bool | None:
            nonlocal due
            if time.monotonic() >= due:
                seen, due = self.look(), time.monotonic() + _LOOK_EVERY_SECONDS
                at = f"micro-batch {seen.micro_batches} of start {seen.start}"
                show(f"hour {seen.hour}, {at}, {seen.files} files")
            return True if condition() else None

        with self.space.story.awaiting(what) as show:
            poll(ask, what, _SECONDS, check)

    def until_in(self, hour: str, share: float, of: int) -> None:
        """Wait until the speed layer has published a share of the `of` micro-batches of an hour."""
        wanted, what = share * of, f"{share:.0%} of hour {hour}"
        self.until(lambda: len(self.micro_batches(hour)) >= wanted, what, self.speed)

    def until_behind(self, hour: str) -> None:
        """Wait until the speed layer publishes only hours after this one."""

        def is_behind() -> bool:
            published = self.micro_batches()
            return bool(published) and min(published[-1].hours) > hour

        self.until(is_behind, f"hour {hour} to end", self.speed)

    def run_beside(self, *arguments: str) -> str:
        """Run a command to its end while the speed layer runs, and return its log. Asserts exit code
        0, publishes of the speed layer in the meantime, and at most MOST_REFUSALS refusals."""
        before = len(self.micro_batches())
        running = self.space.start(*arguments, log=f"{arguments[0]}-{len(self.looks)}")
        self.space.story.command(arguments)
        what = f"anabranch {' '.join(arguments)} to end"
        self.until(lambda: running.code is not None, what, self.speed)
        log = "\n".join(running.log_lines())
        assert running.code == 0, log[-4000:]
        # The hazard: heads moved while the command ran.
        meanwhile = len(self.micro_batches()) - before
        refusals = len(_REFUSED.findall(log))
        self.space.story.say(f"done beside {meanwhile} micro-batches, refused {refusals} times")
        assert meanwhile > 0, "expected the speed layer to go on beside it"
        assert refusals <= MOST_REFUSALS, log[-4000:]
        return log

    def drain(self) -> None:
        """Wait until all records are published, and stop the speed layer as an operator does."""
        self.until(lambda: self.lag == 0, "the speed layer to be at the end", self.speed)
        assert self.speed.terminate() == 0, self.speed.log_tail(20)

    def hours(self) -> dict[str, dict[str, Any]]:
        return {view["hour"]: view for view in plain(views.hours(self.job))}

    def require_exact(self) -> None:
        """Assert that each acknowledged record is a row, a dead letter or a duplicate; audit."""
        comparison = audit.audit(self.job, self.acks, audit.game_event_as_sent)
        for line in comparison.sentences():
            self.space.story.say(line)
        assert comparison.is_exact, comparison.sentences()
        counted = comparison.rows + comparison.dead + comparison.duplicate
        assert comparison.acknowledged == len(self.acks) == counted
        self.space.run("audit", STREAM)

    def windows(self, hour: str, length: int) -> list[Window]:
        """The costs of an hour's micro-batches, at least `length` of one start at a time."""
        windows, done = [], 0
        for start, published in enumerate((s.micro_batches() for s in self.starts), 1):
            looks = [x for x in self.looks if x.start == start and x.hour == hour and x.cpu]
            while looks:
                one = looks[0]
                later = [x for x in looks if x.micro_batches - one.micro_batches >= length]
                if not later:
                    break
                other = later[0]
                number = other.micro_batches - one.micro_batches
                first = sum(hour in m.hours for m in published[: one.micro_batches])
                windows.append(
                    Window(
                        done + first + 1,
                        done + first + number,
                        (other.requests - one.requests) / number,
                        (other.cpu["python"] - one.cpu["python"]) / number,
                        (other.cpu["java"] - one.cpu["java"]) / number,
                        statistics.median(
                            m.seconds for m in published[one.micro_batches : other.micro_batches]
                        ),
                    )
                )
                looks = later
            done += sum(hour in m.hours for m in published)
        return windows

    def report_windows(self, windows: list[Window]) -> None:
        """Print the cost of a micro-batch for each window."""
        columns = ("micro-batches", "S3 requests", "CPU s driver", "CPU s JVM", "seconds (median)")
        self.space.story.table(
            columns,
            [
                (
                    f"{w.first} to {w.last}", f"{w.requests:.1f}", f"{w.python:.3f}",
                    f"{w.jvm:.3f}", f"{w.seconds:.2f}",
                )
                for w in windows
            ],
        )  # fmt: skip

    def report_looks(self, hour: str) -> None:
        """Print the maxima that readers would have found in an hour."""
        looks = [x for x in self.looks if x.hour == hour]
        count = len(self.micro_batches(hour))
        kilobytes = max(x.metadata_bytes for x in looks) // 1000
        files, manifests = max(x.files for x in looks), max(x.manifests for x in looks)
        most = f"{files} files of it, {manifests} manifests and {kilobytes} KB of metadata"
        say = self.space.story.say
        say(f"hour {hour}: {count} micro-batches; in {len(looks)} looks at most {most}")


def _cpu(running: Running) -> dict[str, float]:
    """Return the CPU seconds of a command's processes, by program; empty once it has ended."""
    used: dict[str, float] = {}
    for process in running._members():
        with suppress(psutil.Error):
            times, name = process.cpu_times(), process.name().rstrip("0123456789.")
            used[name] = used.get(name, 0.0) + times.user + times.system
    return used if {"python", "java"} <= used.keys() else {}


@contextmanager
def real_hours() -> Iterator[RealHours]:
    """Provide a stream with running services. The end of the `with` stops everything."""
    with (
        open_workspace(Story(), STREAM) as space,
        running_flaky_s3(space.services.s3_port, seed=0) as front,
    ):
        job = space.job(STREAM)
        try:
            yield RealHours(space, job, front)
        finally:
            job.kafka.close()
