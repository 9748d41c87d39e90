"""A stream of the largest supported size, without its bytes: publishes of the product with data
files that do not exist, and the reads, writes and cost of each publish."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlparse

from lakes import StreamLake, new_environment, new_lake, new_stream
from named_files import named_files
from pyiceberg.io.pyarrow import PyArrowFile

from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import list_manifests
from anabranch.iceberg.snapshots import Staged, head
from anabranch.offsets.hours import Timeline, end_of, plan_seal, shift
from anabranch.offsets.position import Position
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Account, Diff, HourAccount, QualityResult
from anabranch.protocol.publish import Decision, Publish, new_id, new_tag, run, to_commit
from anabranch.protocol.state import Accepted, Confirmed, State
from batch_layer.plan import Rebuilt, plan_publish

PER_PARTITION = 1000


@dataclass
class Cost:
    """The cost of one step: wall and CPU seconds, and the files that were opened, by kind."""

    wall: float = 0.0
    cpu: float = 0.0
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """The minimum of S3 requests: a HEAD and a GET for each read, a PUT for each write."""
        return 2 * self.read.total() + self.written.total()


def _kind(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    if name.endswith(".metadata.json"):
        return "metadata"
    return "list" if name.startswith("snap-") else "manifest" if name.endswith(".avro") else "other"


@contextmanager
def measured() -> Iterator[Cost]:
    """Measure the cost of the body of the `with`."""
    cost = Cost()
    real_open, real_create = PyArrowFile.open, PyArrowFile.create

    def open_(self: PyArrowFile, seekable: bool = True) -> object:
        cost.read[_kind(self.location)] += 1
        return real_open(self, seekable)

    def create(self: PyArrowFile, overwrite: bool = False) -> object:
        cost.written[_kind(self.location)] += 1
        return real_create(self, overwrite)

    with (
        mock.patch.object(PyArrowFile, "open", open_),
        mock.patch.object(PyArrowFile, "create", create),
    ):
        began, cpu = time.perf_counter(), time.process_time()
        yield cost
        cost.wall, cost.cpu = time.perf_counter() - began, time.process_time() - cpu


def median_of(costs: Sequence[Cost]) -> Cost:
    """Return a typical cost: medians of the times, and the counts of the median by requests."""
    middle = sorted(costs, key=lambda c: c.requests)[len(costs) // 2]
    wall, cpu = ([getattr(c, name) for c in costs] for name in ("wall", "cpu"))
    return Cost(statistics.median(wall), statistics.median(cpu), middle.read, middle.written)


class ScaledStream:
    """One stream whose micro-batches, seals and acceptances are the product's own commits."""

    def __init__(self, lake: StreamLake, partitions: int) -> None:
        self.lake, self.partitions = lake, partitions

    @classmethod
    def create(cls, folder: Path, first: str, partitions: int = 12) -> ScaledStream:
        timeline = Timeline(first, first, dict.fromkeys(range(partitions), 0))
        return cls(new_lake(folder, partitions=partitions, timeline=timeline), partitions)

    @classmethod
    def open(cls, folder: Path, partitions: int = 12) -> ScaledStream:
        """Open a stream that another process has created."""
        environment = new_environment(folder)
        return cls(StreamLake(folder, Lake(environment), new_stream(), environment), partitions)

    def micro_batch(self, hour: str, files: int = 1, dates: int = 1) -> Outcome:
        """Publish one micro-batch as the speed layer does."""
        state = self.lake.state()
        made = named_files(self.lake, hour, files, dates)
        return self.publish_micro_batch(state, hour, made)

    def publish_micro_batch(self, state: State, hour: str, made: tuple[object, ...]) -> Outcome:
        ends = state.position.offsets
        offsets = {p: ends.get(p, 0) + PER_PARTITION for p in range(self.partitions)}
        to_main = made if state.served_by(hour) == "speed" else ()
        changes = (Change("speed", made), Change("main", to_main))  # type: ignore[arg-type]
        publish = Publish(new_id(), changes, state.timeline, Position("t", offsets))
        return self.lake.lake.commit(state.table, to_commit(state, publish, datetime.now(UTC)))

    def seal(self, hours: Sequence[str], is_tagged: bool = True) -> None:
        """Seal hours at the current position; retried like every publish."""

        def decide() -> Decision[None]:
            state = self.lake.state()
            left = [h for h in hours if not state.is_sealed(h)]
            if not left:
                return Decision(state, None, None)
            ends = {h: dict(state.position.offsets) for h in left} | state.timeline.boundaries
            timeline = replace(state.timeline, boundaries=ends)
            sealed, done = plan_seal(timeline, "t", end_of(left[-1]))
            now = datetime.now(UTC)
            cuts = [(h, sealed.sealed[h], f"{new_id()}-{h}") for h in done]
            rows = tuple(ledger.decision(h, "sealed", 0, cut, now, id) for h, cut, id in cuts)
            tags = (new_tag(state, f"main-{done[-1]}", "main", now),) if is_tagged else ()
            publish = Publish(new_id(), (Change("speed"),), sealed, state.position, decisions=rows)
            publish = replace(publish, confirmed=_waiting(state), tags=tags)
            return Decision(state, publish, None)

        run(self.lake.lake, self.lake.name, decide, f"seal {hours[0]}", take_turns=True)

    def stage(self, hour: str, files: int = 2) -> Staged:
        """Stage files of an hour as the batch layer does."""
        return self.lake.lake.stage(self.lake.name, new_id(), named_files(self.lake, hour, files))

    def accept(
        self, hour: str, staged: Staged | None = None, timeout: timedelta = timedelta(minutes=5)
    ) -> int:
        """Accept a sealed hour as the batch layer does; return the number of tries."""
        staged = staged or self.stage(hour)
        tries = 0

        def decide() -> Decision[None]:
            nonlocal tries
            tries += 1
            state = self.lake.state()
            rebuilt = Rebuilt(hour, Accepted(1, state.cuts[hour]), staged, (), self._account())
            publish = plan_publish(state, [rebuilt], datetime.now(UTC))
            return Decision(state, replace(publish, confirmed=_waiting(state)), None)

        what, lake = f"hour {hour}", self.lake
        run(lake.lake, lake.name, decide, what, take_turns=True, timeout=timeout)
        return tries

    def accept_many(self, hours: Sequence[str], files: int = 2) -> None:
        """Accept many hours in one commit, of files that were never staged: a history."""
        state = self.lake.state()
        cuts = state.cuts
        staged = {h: Staged(new_id(), 0, 0, named_files(self.lake, h, files)) for h in hours}
        rebuilt = [Rebuilt(h, Accepted(1, cuts[h]), staged[h], (), self._account()) for h in staged]
        publish = plan_publish(state, rebuilt, datetime.now(UTC))
        publish = replace(publish, decisions=(), confirmed=_waiting(state), staged={})
        assert self.lake.publish(publish, state) is Outcome.LANDED

    def past(self, first: str, count: int, at_once: int = 48) -> None:
        """Accept `count` hours from `first` on, without micro-batches."""
        for start in range(0, count, at_once):
            hours = [shift(first, i) for i in range(start, min(count, start + at_once))]
            # Without tags: they expire after a week.
            self.seal(hours, is_tagged=False)
            self.accept_many(hours)

    def manifests(self, branch: str) -> int:
        table = self.lake.table()
        return len(list_manifests(table, head(table, branch))[0])

    def metadata_bytes(self) -> int:
        return Path(urlparse(self.lake.table().metadata_location).path).stat().st_size

    def files(self, branch: str) -> list[str]:
        """Return all live files of a branch, as any reader plans them."""
        table = self.lake.table()
        tasks = table.scan(snapshot_id=head(table, branch).snapshot_id).plan_files()
        return sorted(task.file.file_path for task in tasks)

    def _account(self) -> HourAccount:
        """Return the account of a rebuilt hour with five expectations."""
        account = Account(100_000, good=99_990, dead=1, duplicate=9, gaps={})
        met: dict[str, Any] = {"type": "expect_column_values_to_not_be_null"}
        met |= {"kwargs": {"column": "id"}, "severity": "critical"}
        return HourAccount(
            good=100_000, dead=3, duplicate=12, gap=0, gaps={}, speed_rows=100_012,
            diff=Diff(0, 0, 0, 12, 0, ()),
            quality=QualityResult(True, (), (), 5, "events", (met,) * 5),
            partitions=dict.fromkeys(range(self.partitions), account), sources={"kafka": 100_003},
        )  # fmt: skip


def _waiting(state: State) -> Confirmed:
    return Confirmed(frozenset(d.decision_id for d in state.decisions))
