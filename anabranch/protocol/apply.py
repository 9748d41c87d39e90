"""The tables of a stream: `apply` creates or evolves them and reports its changes. A lost ledger is
restored: its missing rows are written from the state on the branches.

The table of a stream's file that was rolled back keeps the newer columns, and rows of the older
file fit into them. Columns are never removed, so an evolved table is ahead of the stream's earlier
file. `apply --rolled-back` records the columns of the restored file in a table property. Jobs with
exactly these columns continue, and their rows have null in newer columns. Any other job whose file
has fewer columns than the table stops.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from datetime import datetime

from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.types import NestedField

from anabranch.common.errors import (
    ColumnsChanged,
    ConfigurationError,
    NotOffered,
    Refused,
    Terminal,
)
from anabranch.common.json_values import read_property
from anabranch.config import Environment, Stream
from anabranch.iceberg import admin, s3
from anabranch.iceberg import register as registration
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.files import same_file
from anabranch.iceberg.foreign import require_writable
from anabranch.iceberg.foreign_columns import find_foreign_changes, restore_columns
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import content_by_hour
from anabranch.iceberg.owner import OWNER, AnotherStreamsTable, Owner, owner_of, read_owner
from anabranch.iceberg.parquet_writer import OF_TIME, fields_of
from anabranch.iceberg.schema_evolution import (
    Columns,
    evolve,
    plan_evolution,
    plan_table_evolution,
    type_words,
)
from anabranch.iceberg.snapshots import BRANCHES, STAGING, branch_properties, snapshot_properties
from anabranch.iceberg.table_schemas import (
    apply_design,
    archive_schema,
    dead_letters_schema,
    partials_schema,
    rows_columns,
    rows_design,
)
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import Timeline, hour_of, hours_between
from anabranch.offsets.position import Position
from anabranch.protocol import ledger
from anabranch.protocol.deliveries import DELIVERIES_SCHEMA
from anabranch.protocol.erasure import require_sources
from anabranch.protocol.ledger import LEDGER_SCHEMA, Ledger
from anabranch.protocol.ledger_row import HourAccount, Kind, LedgerRow
from anabranch.protocol.publish import new_id
from anabranch.protocol.registers import Erasures
from anabranch.protocol.state import POSITION, TIMELINE, State, load_state

ROLLED_BACK = "anabranch.rolled-back"


def column_words(f: NestedField | None) -> str:
    """Return a column's type as the stream's file writes it; `none` for no column."""
    return "none" if f is None else type_words(f.field_type) + (" NOT NULL" if f.required else "")


def columns_json(schema: Schema) -> str:
    """Return columns as the property lists them; their order does not matter."""
    return json.dumps({f.name: column_words(f) for f in schema.fields}, sort_keys=True)


def is_ahead(name: str, have: Schema, wanted: Columns) -> bool:
    """Whether rows of the wanted columns fit into a table: it has them, as wide or wider. Pure."""
    try:
        return bool(
            plan_evolution(
                name, wanted.schema, Columns(have, wanted.source, wanted.key, complete=True)
            )
        )
    except Refused:
        return False


def is_rolled_back(table: Table, wanted: Columns) -> bool:
    """Whether jobs with these columns may continue although the table has more."""
    return table.properties.get(ROLLED_BACK) == columns_json(wanted.schema)


def roll_back(lake: Lake, name: str, wanted: Columns) -> list[str]:
    """Record that the wanted columns are those of an older stream file; return a description of
    each change. Raises Refused for columns that the table never had, Transient."""
    table = lake.load(name)
    if is_rolled_back(table, wanted) or columns_json(table.schema()) == columns_json(wanted.schema):
        return []
    if not is_ahead(name, table.schema(), wanted):
        plan_evolution(name, table.schema(), wanted)
        raise Refused(
            f"table {name}, {wanted.source}: expected columns that the table has too, found more; "
            "run `anabranch apply` without --rolled-back"
        )
    _change(
        lake,
        name,
        Commit(new_id(), {}, (), set_properties={ROLLED_BACK: columns_json(wanted.schema)}),
    )
    have = {f.name: column_words(f) for f in table.schema().fields}
    older = {f.name: column_words(f) for f in wanted.schema.fields}
    newer = ", ".join(column for column, words in have.items() if older.get(column) != words)
    return [
        (
            f"left {name} unchanged, ahead of the stream's file in {newer}: new rows have null or "
            "narrower values there"
        )
    ]


def roll_forward(lake: Lake, name: str) -> list[str]:
    """Delete the record of a rolled-back file; return a text for each change. Raises Transient."""
    if ROLLED_BACK not in lake.load(name).properties:
        return []
    # PyIceberg fails to remove a key that another process, or a lost request, has already removed.
    gone = Commit(
        new_id(), {}, (), set_properties={ROLLED_BACK: ""}, remove_properties=(ROLLED_BACK,)
    )
    _change(lake, name, gone)
    return [f"{name} is no longer ahead of the stream's file"]


def _change(lake: Lake, name: str, commit: Commit) -> None:
    lake.commit_until_landed(name, f"change the properties of {name}", lambda _: commit)


LOG = logging.getLogger(__name__)

_OURS = "Anabranch's own columns"


def apply(
    environment: Environment,
    stream: Stream,
    lake: Lake,
    kafka: KafkaAdapter,
    register: bool = False,
    rolled_back: bool = False,
) -> list[str]:
    """Create or evolve everything that a stream needs; return a description of each change.
    Idempotent.

    The first commit records where the stream begins: position and first hour. Kafka's defaults
    (`auto.offset.reset`) are never used after it. `register`: first register tables that are in
    storage and that the catalog has lost. `rolled_back`: leave the stream's table ahead of a file
    that was restored to an older version.

    Raises Refused for a schema change that would lose or hide data, ConfigurationError for tables
    that the catalog lost, for a table of another stream, and for a new source of a column by which
    records are erased, before anything is changed.
    """
    changes: list[str] = []
    # Tables that are to be registered cannot be loaded before.
    if not register:
        _require_own(stream, lake)
        changes += _take_over(stream, lake, kafka) if lake.exists(stream.table) else []
    places = (environment.catalog.warehouse, stream.location or "")
    for bucket in dict.fromkeys(map(s3.bucket_of, places)):
        if bucket is not None and _ensure_bucket(environment, bucket):
            changes.append(f"created bucket {bucket}")
    wanted = (
        (stream.table, rows_columns(stream), (*OF_TIME, *stream.partition)),
        (stream.dead_letters_table, Columns(dead_letters_schema(), _OURS), ("ingest_hour",)),
        (stream.hours_table, Columns(LEDGER_SCHEMA, _OURS), ()),
        *(
            (stream.partials_table(v), Columns(partials_schema(stream, v), _OURS), ("ingest_hour",))
            for v in stream.views
        ),
        *(((stream.egress_table, Columns(DELIVERIES_SCHEMA, _OURS), ()),) if stream.egress else ()),
        *(
            ((stream.archive_table, Columns(archive_schema(), _OURS), ("ingest_hour",)),)
            if stream.archive
            else ()
        ),
    )
    # Tables whose contents can be computed again.
    derived = {*stream.plain_tables, *map(stream.partials_table, stream.views)}
    if register:
        for name, columns, _ in wanted:
            at = stream.place_of(name)
            changes += registration.register(lake, name, columns.schema, at)
        _require_own(stream, lake)
        changes += _take_over(stream, lake, kafka) if lake.exists(stream.table) else []
    missing = {name for name, _, _ in wanted if not lake.exists(name)}
    for name, columns, _ in wanted:
        # A dropped ledger is restored from the state on the branches, partials of a view from the
        # rows, and deliveries by delivering again.
        if name in missing:
            # Decision 6: a new table beside the files of a lost one would have only the records
            # that Kafka still has.
            try:
                derives = name in derived
                at = stream.place_of(name)
                registration.require_unknown(lake, name, columns.schema, stream.name, derives, at)
            except NotOffered as error:
                changes.append(f"not examined whether the catalog has lost table {name}: {error}")
    if not missing & {stream.table, stream.hours_table}:
        table = lake.load(stream.table)
        # A dropped branch is created again below.
        refs = table.metadata.refs
        present_heads = [refs[branch].snapshot_id for branch in BRANCHES if branch in refs]
        branch_states = (
            [branch_properties(table, branch) for branch in BRANCHES]
            if len(present_heads) == len(BRANCHES)
            else [snapshot_properties(table, head) for head in present_heads]
        )
        erasures = Erasures.of_branches(branch_states)
        require_sources(environment, stream, Ledger(lake, stream.hours_table), erasures)
    # Ask Kafka before tables are created: without its answer, none is.
    first = _beginning(stream, lake, kafka) if stream.table in missing else {}
    # The stream's table is first: only its columns can be refused, and then nothing has changed.
    for name, columns, by in wanted:
        owner = (
            {OWNER: Owner(stream.name, stream.topic, kafka.cluster_id()).to_json()}
            if name == stream.table
            else {}
        )
        properties = admin.TABLE_PROPERTIES | owner
        if admin.create(lake, name, columns.schema, by, properties, stream.place_of(name)):
            changes.append(f"created table {name}")
        elif name == stream.table:
            changes += _evolve_rows(lake, stream, columns, rolled_back)
        else:
            changes += evolve(lake, name, columns)
    changes += apply_design(lake, stream.table, rows_design(stream))
    if not first and not lake.load(stream.table).metadata.refs:
        first = _beginning(stream, lake, kafka)
    # The position is in the first commit, so no job ever starts without one and reads from Kafka's
    # default.
    created = admin.add_branches(lake, stream.table, first)
    changes += [f"created branch {b} of {stream.table}" for b in created]
    if "main" in created and first:
        changes.append(f"recorded the beginning: {first[POSITION]}")
    for name in stream.branched_tables:
        changes += [f"created branch {b} of {name}" for b in admin.add_branches(lake, name, {})]
    if rows := restore_ledger(lake, stream):
        changes.append(
            f"restored {rows} rows of {stream.hours_table} from the state on the branches: it had "
            "none of these hours"
        )
    return changes


def _ensure_bucket(environment: Environment, bucket: str) -> bool:
    """Create the bucket if it is missing; return whether it was created. The bucket of a REST
    catalog may be the catalog's own, whose keys are for tables alone. Raises ConfigurationError,
    Transient."""
    try:
        return s3.open_store(environment.s3).ensure_bucket(bucket)
    except ConfigurationError as error:
        if environment.catalog.type != "rest" or environment.s3.access_key is not None:
            raise
        LOG.debug("%s; expecting the catalog to have it", error)
    return False


def is_created(lake: Lake, stream: Stream) -> bool:
    """Whether a stream has the tables and branches of `apply`. Raises Terminal, Transient."""
    branched = (stream.table, *stream.branched_tables)
    if not all(map(lake.exists, (*branched, *stream.plain_tables))):
        return False
    return all({*BRANCHES, STAGING} <= lake.load(name).metadata.refs.keys() for name in branched)


def _require_own(stream: Stream, lake: Lake) -> None:
    """Raise AnotherStreamsTable if one of the stream's other tables is the table of a stream."""
    file = f"streams/{stream.name}.yaml"
    for name in filter(lake.exists, (*stream.branched_tables, *stream.plain_tables)):
        table = lake.load(name)
        require_writable(table)
        if (owner := read_owner(table)) is not None:
            raise AnotherStreamsTable(
                f"{file}: table {name}: expected a table of its own beside {stream.table}, found "
                f"the table of stream {owner.stream} (streams/{owner.stream}.yaml); nothing was "
                "changed. Give `table:` or the view of one of the two files another name"
            )


def _require_layout(stream: Stream, table: Table) -> None:
    """Raise ConfigurationError if the stream's file has other partition fields, or another
    location, than its table was made with."""
    file = f"streams/{stream.name}.yaml"
    found = tuple(field for field in fields_of(table) if field not in OF_TIME)
    if found != stream.partition:
        raise ConfigurationError(
            f"{file}: partition: expected {_list(found)}, with which table {stream.table} was "
            f"made, found {_list(stream.partition)}; nothing was changed. Partition fields are not "
            "changed later: write the old ones, or give `table:` another name and begin again"
        )
    place = stream.place_of(stream.table)
    if place is not None and same_file(place) != same_file(table.location()).rstrip("/"):
        raise ConfigurationError(
            f"{file}: location: expected {stream.table} in {place}, found it in "
            f"{table.location()}; nothing was changed. A table is not moved: remove the key, or "
            "give `table:` another name and begin again"
        )


def _list(fields: tuple[str, ...]) -> str:
    return f"[{', '.join(fields)}]" if fields else "no fields"


def _take_over(stream: Stream, lake: Lake, kafka: KafkaAdapter) -> list[str]:
    """Record a renamed stream, or its corrected topic, as the owner of its table; return a
    description of the change. Only a stream that reads the topic of the table's position may take
    it over: raises AnotherStreamsTable for another topic id."""
    table = lake.load(stream.table)
    require_writable(table)
    _require_layout(stream, table)
    owner = owner_of(table)
    is_own = owner.stream == stream.name
    # Without the branches, the next run does it.
    if (is_own and owner.topic == stream.topic) or not set(BRANCHES) <= table.metadata.refs.keys():
        return []
    position = read_property(branch_properties(table, "speed"), POSITION, Position.from_json)
    if position.topic_id:
        topic = kafka.describe(stream.topic)
        if is_own and (topic is None or topic.id != position.topic_id):
            LOG.warning(
                "stream %s: table %s was read from topic %s, the stream's file names %s: "
                "`anabranch adopt %s` continues there",
                stream.name,
                stream.table,
                owner.topic,
                stream.topic,
                stream.name,
            )
            return []
        if topic is None:
            return []
        # Decision 37: a recreated topic and another stream's topic look the same, so the owner is
        # not known.
        if topic.id != position.topic_id:
            raise AnotherStreamsTable(
                f"streams/{stream.name}.yaml: table {stream.table}: expected a table that was "
                f"read from topic {stream.topic} (id {topic.id}), found a position of topic id "
                f"{position.topic_id}; nothing was changed. If the table is another stream's: "
                "give `table:` another name. If the topic was deleted and made again, or moved to "
                f"another cluster: run `anabranch adopt {stream.name}`"
            )
    wanted = Owner(stream.name, stream.topic, kafka.cluster_id())

    def write(table: Table, tx: Transaction) -> None:
        if owner_of(table) == owner:
            tx.set_properties({OWNER: wanted.to_json()})

    admin.change_table(lake, stream.table, "owner", write)
    if is_own:
        return [f"table {stream.table} is of topic {stream.topic} now, and was of {owner.topic}"]
    return [
        f"table {stream.table} belongs to stream {stream.name} now, and belonged to stream "
        f"{owner.stream}"
    ]


def _beginning(stream: Stream, lake: Lake, kafka: KafkaAdapter) -> dict[str, str]:
    """Return position and timeline of the first commit: offset 0 of a topic that is missing."""
    topic = kafka.describe(stream.topic)
    # Decision 4: by a fast clock, the first hour would be one that has not begun.
    now = lake.clock.now()
    if topic is None:
        LOG.warning(
            "topic %s does not exist yet: the stream will begin at its first record", stream.topic
        )
        position = Position("", {})
    else:
        offsets = (
            kafka.log_starts(topic) if stream.start == "earliest" else kafka.stable_ends(topic)
        )
        position = Position(topic.id, offsets)
    timeline = Timeline(hour_of(now), hour_of(now), dict(position.offsets))
    return {POSITION: position.to_json(), TIMELINE: timeline.to_json()}


def _evolve_rows(lake: Lake, stream: Stream, columns: Columns, rolled_back: bool) -> list[str]:
    name = stream.table
    if rolled_back:
        return roll_back(lake, name, columns)
    table = lake.load(name)
    if is_rolled_back(table, columns):
        return []
    if restored := restore_columns(lake, name, columns.schema):
        return [*restored, *_evolve_rows(lake, stream, columns, rolled_back)]
    try:
        plan_evolution(name, table.schema(), columns)
    except Refused as error:
        if is_ahead(name, table.schema(), columns):
            raise Refused(f"{error}; {_if_rolled_back(stream)}") from error
    return [*roll_forward(lake, name), *evolve(lake, name, columns)]


def require_columns(table: Table, stream: Stream) -> None:
    """Require that the table has the columns of the stream's file as this process has read it, or
    that the table is recorded as ahead of that file. Raises Terminal, or ColumnsChanged for a
    stream with the columns of a subject. A job that keeps running while `apply` evolves its table
    would write rows without the new columns.
    """
    require_writable(table)
    columns = rows_columns(stream)
    have = {f.name: f for f in table.schema().fields}
    wanted = {f.name: f for f in columns.schema.fields}
    names = {**wanted, **have}
    differs = next(
        (n for n in names if column_words(wanted.get(n)) != column_words(have.get(n))), None
    )
    name = ".".join(table.name())
    if changes := find_foreign_changes(table, columns.schema):
        raise Terminal(
            f"table {name}: expected the columns of the last publish, found that "
            f"{changes[0].words(name)}; nothing is published; run `anabranch apply {stream.name}`, "
            "which brings the column back with its values, then restart the jobs"
        )
    if differs is None or is_rolled_back(table, columns):
        return
    difference = (
        f"table {name}: expected column {differs} {column_words(wanted.get(differs))}, found "
        f"{column_words(have.get(differs))}"
    )
    if stream.subject_schema is not None:
        raise ColumnsChanged(
            f"{difference}; nothing is lost: the next attempt uses the table's columns"
        )
    remedy = (
        f"run `anabranch apply {stream.name}`, then restart the jobs that were started before it: "
        "nothing is lost"
    )
    try:
        plan_evolution(name, table.schema(), columns)
    except Refused:
        if is_ahead(name, table.schema(), columns):
            raise Terminal(f"{difference}; {remedy}; {_if_rolled_back(stream)}") from None
        try:
            plan_table_evolution(table, columns)
        except Refused as error:
            raise Terminal(
                f"{difference}; nothing is lost; `anabranch apply {stream.name}` fails with: "
                f"{error}"
            ) from error
    raise Terminal(f"{difference}; {remedy}")


def _if_rolled_back(stream: Stream) -> str:
    return (
        f"if the stream's file was rolled back on purpose: `anabranch apply {stream.name} "
        "--rolled-back` leaves the table ahead of it"
    )


WHY = "restored from the state on the branches; other fields were in the ledger only"


def plan_rows(
    state: State,
    known: Collection[str],
    good: Mapping[str, int],
    dead: Mapping[str, int],
    now: datetime,
    first: str = "",
) -> list[LedgerRow]:
    """Return rows for the sealed hours from `first` on that the ledger lacks, oldest first: cut,
    revision, and the counts that the branches have (`good` and `dead`: the rows of the batch
    branches by hour; unknown for an expired hour). The ids are deterministic, so two processes that
    restore at once write each row once.
    """
    rows = []
    for hour in missing_hours(state, known, first):
        accepted = state.accepted.get(hour)
        served = state.served_by(hour)
        cut = state.cuts.get(hour)
        kind: Kind = "sealed"
        revision, account = 0, HourAccount()
        if state.is_accepted(hour):
            kind, revision = "accepted", accepted.revision if accepted is not None else 1
            if not state.is_expired(hour):
                account = HourAccount(good=good.get(hour, 0), dead=dead.get(hour, 0))
        # Two processes that restore at once write the same id, so the second append finds its row.
        id = f"restored-{hour}-{kind}-{revision}"
        rows.append(
            ledger.decision(
                hour, kind, revision, cut, now, id, served=served, reason=WHY, account=account
            )
        )
        if state.is_expired(hour):
            rows.append(
                ledger.decision(
                    hour, "expired", revision, None, now, f"restored-{hour}-expired", reason=WHY
                )
            )
    return rows


def missing_hours(state: State, known: Collection[str], first: str = "") -> list[str]:
    """Return the sealed hours from `first` on that are not in `known`. Pure."""
    return [
        h
        for h in hours_between(max(state.timeline.first, first), state.timeline.open)
        if h not in known
    ]


def restore_ledger(lake: Lake, stream: Stream) -> int:
    """Write the missing ledger rows of the table's hours; return their number. Idempotent. Raises
    Transient.

    Writes decisions that wait on a branch first, since they have more fields.
    """
    state = load_state(lake, stream.table)
    if state.timeline.open == state.timeline.first:
        return 0
    stream_ledger = Ledger(lake, stream.hours_table)
    stream_ledger.record_waiting(state)
    known = {row.hour for row in stream_ledger.history(without=ledger.BULKY)}
    # Decision 50: hours before it were removed by retention and are not lost.
    first = stream_ledger.first_hour()
    if not missing_hours(state, known, first):
        return 0
    good, dead = (
        {h: content.rows for h, content in content_by_hour(lake.load(t), "batch").items()}
        for t in (stream.table, stream.dead_letters_table)
    )
    rows = plan_rows(state, known, good, dead, lake.clock.now(), first)
    stream_ledger.record(rows)
    LOG.warning(
        "stream %s: restored ledger rows from the state on the branches rows=%d",
        stream.name,
        len(rows),
    )
    return len(rows)
