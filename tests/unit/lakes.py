"""A real lake in a folder: SQLite, `file://`, and rows staged as by Spark, without a JVM."""

import json
import re
import shutil
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import AddSnapshotUpdate, AssertTableUUID

from anabranch import config
from anabranch.common.temporary import process_folder
from anabranch.config.columns import parse_columns
from anabranch.iceberg import admin, table_schemas
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import OWNER, Owner
from anabranch.iceberg.prepare import set_ref
from anabranch.iceberg.snapshots import WAP_ID, Staged, find_staged, heads, staged_ref
from anabranch.offsets.hours import Cut, Timeline
from anabranch.offsets.position import Position
from anabranch.protocol import apply, ledger
from anabranch.protocol.dead_letters import roll_forward
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import Kind, LedgerRow
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import (
    POSITION,
    TIMELINE,
    Accepted,
    State,
    accepted_properties,
    load_state,
)

FIRST = "2026-11-21T00"
DDL = "id STRING NOT NULL, n INT"
_TIME = re.compile(r'("(?:timestamp|last-updated)-ms": ?)\d+')
# (ingest hour, partition, offset)
Row = tuple[str, int, int]


def new_environment(
    folder: Path, s3: config.S3 | None = None, **catalog: Any
) -> config.Environment:
    """A lake in a folder, or bucket `lake` of `s3`; `catalog`: other settings of it."""
    settings = catalog or {"uri": f"sqlite:///{folder}/catalog.db"}
    warehouse = f"file://{folder}/warehouse" if s3 is None else "s3://lake/warehouse"
    return config.Environment(
        kafka=config.Kafka(bootstrap_servers="127.0.0.1:1"),
        catalog=config.Catalog(name="lake", warehouse=warehouse, **settings),
        s3=s3 or config.S3(),
    )


def new_stream(**values: Any) -> config.Stream:
    """A stream with the columns of its schema."""
    given: dict[str, Any] = {
        "name": "events", "topic": "events", "table": "games.events", "schema": DDL, "key": "id",
    } | values  # fmt: skip
    if "columns" not in given:
        given["columns"] = parse_columns(given["schema"])
    return config.Stream(**given)


def table_of(folder: Path, ddl: str) -> tuple[Lake, Table]:
    """A table of rows with these columns, beside a new stream's own."""
    lake = new_lake(folder).lake
    admin.create(lake, "games.other", table_schemas.rows_schema(new_stream(schema=ddl)), (), {})
    return lake, lake.load("games.other")


@dataclass(frozen=True)
class StreamLake:
    """A stream's tables as `apply` leaves them, and short words for what tests do to them."""

    folder: Path
    lake: Lake
    stream: config.Stream
    environment: config.Environment

    @property
    def name(self) -> str:
        return self.stream.table

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.lake, self.stream.hours_table)

    @property
    def publisher(self) -> Publisher:
        """A new one."""
        return Publisher(self.lake, self.stream)

    def again(self) -> Lake:
        """A second publisher: its own catalog, the same tables."""
        return Lake(self.environment)

    def table(self) -> Table:
        return self.lake.load(self.name)

    def state(self) -> State:
        return load_state(self.lake, self.name)

    def stage(self, rows: Iterable[Row], wap_id: str | None = None) -> Staged:
        """Rows in files of their own and one snapshot that no branch points to."""
        return stage(self.lake, self.name, [event(p, o, hour) for hour, p, o in rows], wap_id)

    def stage_dead(
        self, rows: Iterable[Row], layer: str, wap_id: str | None = None, protected: bool = True
    ) -> Staged:  # fmt: skip
        """Dead letters in files and one snapshot, on a branch unless others dropped it."""
        values = [record(*row, layer=layer) for row in rows]
        return stage(self.lake, self.stream.dead_letters_table, values, wap_id, protected)

    def rows(self, branch: str) -> list[Row]:
        """Every row of a branch, sorted; a row that is there twice is there twice."""
        return rows(self.lake, self.name, branch)

    def dead(self, branch: str) -> list[Row]:
        return rows(self.lake, self.stream.dead_letters_table, branch)

    def speed(
        self, staged: Staged, offsets: dict[int, int], state: State | None = None, **values: Any
    ) -> Publish:
        """Return a publish of the speed layer: rows to `speed` and `main`, and its position."""
        state = state or self.state()
        changes = (Change("speed", staged.files), Change("main", staged.files))
        position = Position("t", state.position.offsets | offsets)
        given = {"staged": {staged.wap_id: staged.snapshot_id}, "timeline": state.timeline}
        return Publish(staged.wap_id, changes, position=position, **(given | values))

    def accept(
        self, staged: Staged, hour: str, accepted: Accepted, state: State | None = None, **v: Any
    ) -> Publish:
        """Return a publish of the batch layer: an hour's only rows for `batch` and `main`."""
        state = state or self.state()
        changes = (
            Change(
                "batch",
                staged.files,
                properties=accepted_properties(state, {hour: accepted}),
                clear=(hour,),
            ),
            Change("main", staged.files, clear=(hour,)),
        )
        v = {"staged": {staged.wap_id: staged.snapshot_id}, "timeline": state.timeline} | v
        return Publish(staged.wap_id, changes, **v)

    def publish(
        self, publish: Publish, state: State | None = None, lake_: Lake | None = None
    ) -> Outcome:
        state = state or self.state()
        commit = to_commit(state, publish, datetime.now(UTC))
        return (lake_ or self.lake).commit(state.table, commit)

    def land(self, publish: Publish, state: State | None = None) -> None:
        """Publish; fails if another publish was first, or if it was refused."""
        assert self.publish(publish, state) is Outcome.LANDED

    def change(self, *changes: Change, state: State | None = None, **values: Any) -> None:
        """Land a publish of these changes, decided over `state` or the table as it is."""
        state = state or self.state()
        values = {"timeline": state.timeline} | values
        self.land(Publish(new_id(), changes, **values), state)

    def serve(self, rows: Iterable[Row], offsets: dict[int, int], **values: Any) -> None:
        """Stage rows, and publish them as the speed layer."""
        self.land(self.speed(self.stage(rows), offsets, **values))

    def roll(self, state: State | None = None) -> frozenset[str]:
        """Publish the dead letters that wait, by the state of now or of another time."""
        return roll_forward(self.lake, self.stream.dead_letters_table, state or self.state())

    def letters(self) -> Table:
        return self.lake.load(self.stream.dead_letters_table)

    def add_archive(self) -> str:
        """Create the archive's table, and return its name."""
        name, schema = self.stream.archive_table, table_schemas.archive_schema()
        admin.create(self.lake, name, schema, ("ingest_hour",), admin.TABLE_PROPERTIES)
        admin.add_branches(self.lake, name, {})
        return name

    def move(self, branch: str) -> None:
        """Move one branch's head by an empty publish of another publisher."""
        own = self.again()
        # Others may publish at the same moment.
        for _ in range(100):
            state = load_state(own, self.name)
            publish = Publish(new_id(), (Change(branch),), state.timeline)
            if self.publish(publish, state) is Outcome.LANDED:
                return
        raise AssertionError(f"expected {branch} to move, found each of 100 publishes overtaken")

    def set_back(self, branch: str, snapshot_id: int, name: str | None = None) -> None:
        """Set a branch of the rows' table, or of another one, back, as another program may."""
        table = self.lake.load(name or self.name)
        self.lake.catalog.commit_table(table, (), (set_ref(branch, snapshot_id, "branch"),))

    def foreign_commit(self, branch: str) -> int:
        """A commit by an engine that knows nothing of ours: no property is kept. Returns its id."""
        table = self.table()
        tx = Transaction(table)
        tx.update_snapshot(branch=branch).fast_append().commit()
        self.lake.catalog.commit_table(table, tuple(tx._requirements), tuple(tx._updates))
        return self.table().metadata.refs[branch].snapshot_id

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Fail if a branch of the rows' table moves meanwhile."""
        before = self.state().heads
        yield
        assert self.state().heads == before

    def metadata_files(self) -> set[str]:
        """The manifests and manifest lists that storage holds."""
        location = Path(urlparse(self.table().location()).path)
        return {path.name for path in location.glob("metadata/*.avro")}


def new_lake(
    folder: Path,
    partitions: int = 1,
    timeline: Timeline | None = None,
    ddl: str = DDL,
    owner: str | None = None,
    name: str = "events",
    s3: config.S3 | None = None,
    namespace: str = "games",
    **catalog: Any,
) -> StreamLake:
    """Create a stream's tables and branches in a folder, at position 0 of every partition. `owner`
    is the name of the stream that the table belongs to."""
    stream = new_stream(name=name, topic=name, table=f"{namespace}.{name}", schema=ddl)
    position = Position("t", dict.fromkeys(range(partitions), 0))
    first = timeline or Timeline(FIRST, FIRST, dict(position.offsets))
    tables = tables_of(stream, first, position, owner)
    if s3 is None and not catalog:
        return copied_lake(folder, stream, tables)
    environment = new_environment(folder, s3, **catalog)
    made = StreamLake(folder, Lake(environment), stream, environment)
    _create(made.lake, tables)
    return made


@dataclass(frozen=True)
class NewTable:
    """A table, and the properties of its branches, if it has any."""

    name: str
    schema: Schema
    partitioned_by: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] | None = None


def tables_of(
    stream: config.Stream, timeline: Timeline, position: Position, owner: str | None = None
) -> tuple[NewTable, ...]:
    """A stream's tables as `apply` makes them."""
    owned = {OWNER: Owner(owner or stream.name, stream.topic, "cluster").to_json()}
    first = {TIMELINE: timeline.to_json(), POSITION: position.to_json()}
    by_hour: Any = {"partitioned_by": ("ingest_hour",), "branches": {}}
    rows, letters = table_schemas.rows_schema(stream), table_schemas.dead_letters_schema()
    return (
        NewTable(stream.table, rows, ("event_date", "ingest_hour"), owned, first),
        NewTable(stream.dead_letters_table, letters, **by_hour),
        NewTable(stream.hours_table, apply.LEDGER_SCHEMA),
        *(
            NewTable(stream.partials_table(v), table_schemas.partials_schema(stream, v), **by_hour)
            for v in stream.views
        ),
    )


def _create(lake: Lake, tables: Iterable[NewTable]) -> None:
    for table in tables:
        properties = admin.TABLE_PROPERTIES | table.properties
        admin.create(lake, table.name, table.schema, table.partitioned_by, properties)
        if table.branches is not None:
            admin.add_branches(lake, table.name, table.branches)


def copied_lake(folder: Path, stream: config.Stream, tables: tuple[NewTable, ...]) -> StreamLake:
    """Return a stream's tables in a folder, on SQLite and files. Tables that are equal except for
    the folder are created once and then copied, which takes a tenth of the time."""
    environment = new_environment(folder)
    made = StreamLake(folder, Lake(environment), stream, environment)
    if folder.joinpath("catalog.db").exists():
        _create(made.lake, tables)
    else:
        _copy(_created(tables), folder)
    return made


_CREATED: dict[str, Path] = {}


def _created(tables: tuple[NewTable, ...]) -> Path:
    """The folder of a lake with such tables, which is there as long as this process."""
    key = repr(tables)
    if key not in _CREATED:
        folder = process_folder("lakes") / str(len(_CREATED))
        folder.mkdir()
        _create(Lake(new_environment(folder)), tables)
        _CREATED[key] = folder
    return _CREATED[key]


def _copy(lake: Path, folder: Path) -> None:
    """Copy a lake of SQLite and files to another folder, as created there: own ids and times."""
    shutil.copytree(lake, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    with closing(sqlite3.connect(folder / "catalog.db")) as catalog, catalog:
        catalog.execute("PRAGMA synchronous = OFF")
        for place in ("metadata_location", "previous_metadata_location"):
            statement = f"UPDATE iceberg_tables SET {place} = replace({place}, ?, ?)"
            catalog.execute(statement, (str(lake), str(folder)))
    ids: dict[str, str] = {}
    now = int(datetime.now(UTC).timestamp() * 1000)
    for file in folder.glob("warehouse/**/*.metadata.json"):
        text = file.read_text(encoding="utf-8")
        own = json.loads(text)["table-uuid"]
        new = ids.setdefault(own, str(uuid.uuid4()))
        text = text.replace(str(lake), str(folder)).replace(own, new)
        file.write_text(_TIME.sub(rf"\g<1>{now}", text), encoding="utf-8")


def decide(
    hour: str,
    kind: Kind,
    revision: int,
    cut: Cut | None,
    now: datetime,
    id: str | None = None,
    **values: Any,
) -> LedgerRow:
    """A decision that says `values`: the ledger's columns, as JSON has them."""
    columns = {name: values.pop(name) for name in ("snapshot_id", "sequence") if name in values}
    row = ledger.decision(hour, kind, revision, cut, now, id)
    return replace(LedgerRow.from_waiting(row.as_waiting() | values), **columns)


def event(p: int, o: int, hour: str, **values: Any) -> dict[str, Any]:
    """A row as the table has it; its key is its place unless said otherwise."""
    return {
        "id": f"{p}-{o}", "n": o, "kafka_partition": p, "kafka_offset": o,
        "kafka_timestamp": datetime(2026, 11, 21, tzinfo=UTC), "ingest_hour": hour,
        "event_date": date(2026, 11, 21),
    } | values  # fmt: skip


def record(
    hour: str, partition: int, offset: int, value: bytes = b"{", **values: Any
) -> dict[str, Any]:
    """A record in the archive, and as a dead letter."""
    place = {"ingest_hour": hour, "kafka_partition": partition, "kafka_offset": offset}
    return {"topic_id": "t", **place, "value": value, "error_code": "malformed"} | values


def stage(
    lake_: Lake,
    name: str,
    values: Iterable[dict[str, Any]],
    wap_id: str | None = None,
    protected: bool = False,
) -> Staged:
    """Rows of a table in files and one snapshot that no branch points to, unless `protected`."""
    wap_id = wap_id or new_id()
    table = lake_.load(name)
    tx = Transaction(table)
    frame = pa.Table.from_pylist(list(values), schema=schema_to_pyarrow(table.schema()))
    tx.append(frame, snapshot_properties={WAP_ID: wap_id}, branch=None)
    updates = list(tx._updates)
    if protected:
        [made] = [u.snapshot.snapshot_id for u in updates if isinstance(u, AddSnapshotUpdate)]
        updates.append(set_ref(staged_ref(wap_id), made, SnapshotRefType.BRANCH))
    whole = (AssertTableUUID(uuid=table.metadata.table_uuid),)
    lake_.catalog.commit_table(table, whole, tuple(updates))
    staged = find_staged(lake_.load(name), wap_id)
    assert staged is not None
    return staged


def content(lake_: Lake, name: str, branch: str = "main") -> pa.Table:
    """Every row of a branch."""
    table = lake_.load(name)
    return table.scan(snapshot_id=table.metadata.refs[branch].snapshot_id).to_arrow()


def rows(lake_: Lake, name: str, branch: str) -> list[Row]:
    records = content(lake_, name, branch).to_pylist()
    return sorted((r["ingest_hour"], r["kafka_partition"], r["kafka_offset"]) for r in records)


def waiting(state: State, branch: str, key: str) -> list[str]:
    """The ids that wait under `key` on one branch."""
    return [item["id"] for item in json.loads(state.branch_properties[branch].get(key, "[]"))]


def new_state(timeline: Timeline, offsets: dict[int, int] | None = None, **values: Any) -> State:
    """A state of no table, for what decides over values alone."""
    given: dict[str, Any] = {
        "table": None, "heads": {}, "position": Position("t", offsets or {}), "timeline": timeline,
        "accepted": {}, "settled_before": timeline.first, "overrides": {}, "decisions": (),
        "dead_letters": (), "merged": {}, "retained_hours": (), "content": {},
        "branch_properties": {},
    }  # fmt: skip
    return State(**(given | values))


def add_snapshots(lake_: Lake, name: str, count: int, files: Iterable[DataFile] = ()) -> None:
    """Commits to `main` of a table that expire nothing, the first one with `files`."""
    added = tuple(files)
    for _ in range(count):
        table = lake_.load(name)
        commit = Commit(new_id(), heads(table), (Change("main", added),))
        assert lake_.commit(table, commit) is Outcome.LANDED
        added = ()


def limit_commits(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """From now on, fail after `most` calls of `commit_until_landed` for one table."""
    calls, original = Counter[str](), Lake.commit_until_landed

    def limited(lake_: Lake, name: str, *given: Any) -> Commit | None:
        calls[name] += 1
        assert calls[name] <= most, f"expected at most {most} commits of {name}, found no end"
        return original(lake_, name, *given)

    monkeypatch.setattr(Lake, "commit_until_landed", limited)


def at_next_commit(
    lake_: Lake, before: Callable[[], object] = list, after: Callable[[], object] = list
) -> None:
    """Act right before or after the next commit; its answer is lost if either act raises."""
    catalog = lake_.catalog
    real = catalog.commit_table

    def commit_table(*request: Any) -> Any:
        catalog.commit_table = real  # type: ignore[method-assign]
        before()
        answer = real(*request)
        after()
        return answer

    catalog.commit_table = commit_table  # type: ignore[method-assign]


def lose_answer() -> None:
    raise ConnectionError("connection reset")


def snapshots(lake_: Lake, name: str) -> set[int]:
    return {s.snapshot_id for s in lake_.load(name).snapshots()}
