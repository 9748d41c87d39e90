"""A stream of people in a real lake, to erase some of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brokers import Broker
from lakes import DDL, FIRST, content, event, new_lake, new_stream, record, stage
from pydantic import SecretStr

from anabranch import config
from anabranch.config.environment import ErasureKeys
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.files import local_path
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.lifecycle.erasure import run
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import ledger, ledger_row, publish
from anabranch.protocol.dead_letters import waiting_batch, waiting_speed
from anabranch.protocol.state import Accepted

NEXT = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 8)})
NOW = datetime(2026, 11, 21, 5, tzinfo=UTC)
ORDER = run.ErasureRequest("id", frozenset({"anna"}), "case 4711")
NAMES = ("anna", "bert", "anna", "carl")
ARCHIVED = {
    0: b'{"id": "anna"}', 1: b'{"id": "bert"}', 2: b'{"id": "a\\u006ena"}', 3: b'{"id": "carl"}',
    4: b'{"id": "anna", ', 5: b"annabel", 6: b"x anna y", 7: b'{"id": "anna", "again": true}',
}  # fmt: skip
Letters = Sequence[tuple[str, int, bytes]]
LETTERS: Letters = ((FIRST, 4, b'{"id": "anna", '), (FIRST, 5, b"annabel"), (FIRST, 6, b"x anna y"))


class People:
    """A stream of people: an hour that both layers have, the next one that only the speed layer
    has, and dead letters; with an archive of the first hour or without one."""

    def __init__(
        self,
        folder: Path,
        of_batch: Letters = (),
        s3: config.S3 | None = None,
        ddl: str = DDL,
        archive: bool = False,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        timeline = Timeline(FIRST, NEXT, {0: 8}, sealed={FIRST: CUT})
        self.lake = new_lake(folder, timeline=timeline, s3=s3, ddl=ddl)
        lake, self._properties = self.lake, properties or {}
        for name in (lake.name, *lake.stream.branched_tables, *lake.stream.plain_tables):
            self.set_properties(name)
        self._speed([(FIRST, o) for o in range(4)], 8, self._dead(LETTERS, "speed"))
        self._speed([(NEXT, 8 + o) for o in range(4)], 12, None)
        self._accept(of_batch)
        if archive:
            self._archive()
        lake.publisher.recover()

    def set_properties(self, name: str) -> None:
        with self.lake.lake.load(name).transaction() as tx:
            tx.set_properties({k: v.format(table=name) for k, v in self._properties.items()})

    def _rows(self, rows: list[tuple[str, int]]) -> Any:
        times = {"kafka_timestamp": NOW, "at": NOW}
        values = [event(0, o, hour, id=NAMES[o % 4], **times) for hour, o in rows]
        return stage(self.lake.lake, self.lake.name, values)

    def _dead(self, letters: Letters, layer: str) -> Any:
        code = {"layer": layer, "error_code": "malformed_json"}
        values = [record(hour, 0, o, value, **code) for hour, o, value in letters]
        return stage(self.lake.lake, self.lake.stream.dead_letters_table, values, protected=True)

    def _speed(self, rows: list[tuple[str, int]], end: int, dead: Any) -> None:
        staged = self._rows(rows)
        letters = {"dead_letters": (waiting_speed(dead, NOW),)} if dead is not None else {}
        self.lake.land(self.lake.speed(staged, {0: end}, **letters))

    def _accept(self, letters: Letters) -> None:
        staged = self._rows([(FIRST, o) for o in range(4)])
        dead = self._dead(letters, "batch") if letters else None
        state = self.lake.state()
        new = (waiting_batch(dead, FIRST, 1, NOW),) if dead is not None else ()
        waiting = (*state.dead_letters, *new)
        account = ledger_row.HourAccount(
            offsets=8, good=4, dead=3, duplicate=0, gap=1, gaps={"control": 1},
            partitions={0: ledger_row.Account(8, 4, 3, 0, {"control": 1})},
        )  # fmt: skip
        row = ledger.decision(FIRST, "accepted", 1, CUT, NOW, served="batch", account=account)
        accepted = self.lake.accept(
            staged, FIRST, Accepted(1, CUT), state, decisions=(row,),
            timeline=replace(state.timeline, sealed={}), dead_letters=waiting,
        )  # fmt: skip
        self.lake.land(accepted, state)

    def _archive(self) -> None:
        """The hour's archive in two files: a name is escaped there; a duplicate has no row."""
        self.set_properties(self.lake.add_archive())
        self.archive(range(4), ARCHIVED)
        self.archive(range(4, 8), ARCHIVED)

    def archive(self, offsets: Iterable[int], values: Mapping[int, bytes]) -> None:
        """A commit of records of the hour."""
        lake, name = self.lake.lake, self.lake.stream.archive_table
        staged = stage(lake, name, [record(FIRST, 0, o, values[o]) for o in offsets])
        commit = Commit(publish.new_id(), heads(lake.load(name)), (Change("main", staged.files),))
        assert lake.commit(lake.load(name), commit) is Outcome.LANDED

    @property
    def archived(self) -> dict[int, bytes]:
        rows = content(self.lake.lake, self.lake.stream.archive_table).to_pylist()
        return {row["kafka_offset"]: row["value"] for row in rows}

    @property
    def job(self) -> Job:
        return job_of(self.lake.environment, self.lake.lake)

    def erase(self, order: run.ErasureRequest = ORDER) -> run.Erased:
        return run.erase(self.job, self.lake.publisher, order)

    def names(self, branch: str) -> list[str]:
        return sorted(content(self.lake.lake, self.lake.name, branch)["id"].to_pylist())

    def files(self, branch: str) -> list[Path]:
        """The data files of a branch's rows."""
        table = self.lake.table()
        tasks = table.scan(snapshot_id=table.metadata.refs[branch].snapshot_id).plan_files()
        return [local_path(task.file.file_path) for task in tasks]

    def letters(self, branch: str) -> list[bytes]:
        name = self.lake.stream.dead_letters_table
        return sorted(content(self.lake.lake, name, branch)["value"].to_pylist())

    def account(self, hour: str) -> Any:
        return ledger.newest(self.lake.ledger.history([hour])).get(hour)


def job_of(environment: config.Environment, lake: Lake, records: int = 12) -> Job:
    """A job with the key of erasures, and a log of so many records."""
    keys = ErasureKeys(key=(SecretStr("a key of unit tests"),))
    keyed = environment.model_copy(update={"erasure": keys})
    return Job(keyed, new_stream(), lake, Broker(log={0: [0] * records}).adapter)
