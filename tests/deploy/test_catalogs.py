"""One story on four catalogs, as docs/how-to/deploy/services.md configures them: SQLite,
PostgreSQL, the server of Iceberg's REST compatibility kit, and moto's Glue.

On each, the result is what Kafka acknowledged, and that of the other catalogs.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from commands import call, shown
from world import World, add_catalog, event, past_hour, spread

from anabranch.common.errors import MetadataGone
from anabranch.common.json_values import to_json
from anabranch.iceberg import admin
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.files import delete_files
from anabranch.iceberg.lake import Lake
from anabranch.lifecycle import maintenance
from anabranch.protocol.publish import Publish, new_id, to_commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "deploy" / "services.md"
CATALOGS = ("SQLite", "PostgreSQL", "REST", "Glue")
BUCKET, CREDENTIAL = "tests", "anabranch:client-secret-of-the-test"

Report = dict[str, Any]


def documented(catalog: str) -> dict[str, Any]:
    """The block of docs/how-to/deploy/services.md that configures a catalog."""
    text = rf"```yaml\n# conf/anabranch.yaml, {catalog}\b[^\n]*\n(.*?)```"
    block = re.search(text, DEPLOY.read_text(), re.DOTALL)
    assert block is not None, f"{DEPLOY}: expected a block that configures {catalog}"
    section: dict[str, Any] = yaml.safe_load(block.group(1))["catalog"]
    return section


@pytest.fixture(scope="module")
def neighbours(
    environment: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], None]]:
    """Starts what a catalog needs, and sets the variables that its block of configuration reads."""
    from glue import running_glue
    from postgres import PASSWORD, USER, running_postgres
    from rest_catalog import running_rest_catalog

    folder = tmp_path_factory.mktemp("catalogs")
    with ExitStack() as running, pytest.MonkeyPatch.context() as variables:
        variables.setenv("LAKE_BUCKET", BUCKET)

        def start(catalog: str) -> None:
            if catalog == "SQLite":
                variables.setenv("ANABRANCH_HOME", str(folder))
            elif catalog == "PostgreSQL":
                server = running.enter_context(running_postgres())
                variables.setenv("CATALOG_USER", USER)
                variables.setenv("CATALOG_PASSWORD", PASSWORD)
                variables.setenv("CATALOG_HOST", f"127.0.0.1:{server.port}")
            elif catalog == "REST":
                s3 = environment["s3"]["endpoint"]
                warehouse = f"s3://{BUCKET}/warehouse"
                rest = running.enter_context(running_rest_catalog(folder, warehouse, s3))
                variables.setenv("CATALOG_URL", rest.url)
                variables.setenv("CATALOG_CREDENTIAL", CREDENTIAL)
            else:
                variables.setenv("GLUE_ENDPOINT", running.enter_context(running_glue()).url)

        yield start


@pytest.fixture(scope="module")
def story(
    neighbours: Callable[[str], None], environment: dict[str, Any], spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Report]:  # fmt: skip
    """Runs the story on a catalog, once; its result in words that all catalogs share."""
    by_catalog: dict[str, Report] = {}

    def run_once(catalog: str) -> Report:
        if catalog not in by_catalog:
            neighbours(catalog)
            # The session knows one catalog by the name "lake".
            name = f"c{uuid.uuid4().hex[:12]}"
            own = environment | {"catalog": documented(catalog) | {"name": name}}
            one = World(tmp_path_factory.mktemp(catalog) / "conf", own, spark)
            add_catalog(spark, one.job.environment)
            try:
                by_catalog[catalog] = run_story(one)
            finally:
                one.kafka.close()
        return by_catalog[catalog]

    return run_once


def run_story(one: World) -> Report:
    """Two hours to proven rows, a restatement, an override, a stale publisher, an audit; loss."""
    first, second, now = past_hour(2), past_hour(1), datetime.now(UTC)
    one.topic()
    one.send([*spread(first, 20, "first"), (0, now - timedelta(hours=2), b"{")])
    one.send(spread(second, 20, "second"))
    # A duplicate, in an hour that is open.
    one.send([(1, now, event("first-0", now)), (0, now, event("now", now))])
    # Step 1: apply, twice.
    assert any("created table" in change for change in one.apply())
    assert one.apply() == []
    # Step 2: the speed layer publishes; the batch layer rebuilds both hours and swaps them.
    one.speed()
    sent = [record for record in one.sent if record.value != b"{"]
    good = sorted((r.partition, r.offset, json.loads(r.value or b"")["event_id"]) for r in sent)
    assert one.contents() == one.contents("speed") == good
    decided = [(r.hour, r.decision) for r in one.batch()]
    assert decided == [(first, "accepted"), (second, "accepted")]
    assert one.contents() == good
    # Step 3: a restatement, and an hour that is served by choice.
    assert [(r.decision, r.revision) for r in one.batch(first, restate=True)] == [("accepted", 2)]
    chosen = ("override", one.name, second, "--why", "the story", "--layer")
    assert "now served by speed, by choice" in call(one, *chosen, "speed")
    # Step 4: a publisher whose heads have moved is refused, whichever connection it asks through.
    stale = one.state
    one.send_now(4, "later")
    one.speed()
    late = Publish(new_id(), (Change("speed"),), stale.timeline)
    heads = one.state.heads
    commit = to_commit(stale, late, datetime.now(UTC))
    assert Lake(one.job.environment).commit(stale.table, commit) is Outcome.REFUSED
    assert one.state.heads == heads
    # Step 5: maintenance, as it is due a week later; then the override is lifted.
    maintenance.maintain(one.job, datetime.now(UTC) + timedelta(days=7))
    assert "served by batch, by the rule" in call(one, *chosen, "auto")
    # Step 6: the served rows, by a separate engine and by Spark; and the hours proven again.
    good += [(r.partition, r.offset, json.loads(r.value or b"")["event_id"]) for r in one.sent[-4:]]
    assert one.contents() == sorted(good)
    name = one.job.stream.table
    sql = f"SELECT event_id FROM {name} ORDER BY kafka_partition, kafka_offset"
    answer = [r["event_id"] for r in shown(one, "query", sql)]
    in_spark = sql.replace(name, f"{one.job.environment.catalog.name}.{name}")
    by_spark = one.spark.sql(in_spark).collect()
    assert answer == [r["event_id"] for r in by_spark] == [e for _, _, e in sorted(good)]
    assert [(d["error_code"], bytes(d["value"])) for d in one.dead()] == [("malformed_json", b"{")]
    audit = shown(one, "audit", one.name, "--hours", f"{first}..{second}")
    # Step 7
    _lose_and_register(one)
    assert one.contents() == sorted(good)
    return _in_common_words(one, {first: "first", second: "second", past_hour(0): "now"}, audit)


def _lose_and_register(one: World) -> None:
    """The catalog loses tables and storage a file: reported, and fixed by one command."""
    stream = one.job.stream
    tables = (stream.table, stream.dead_letters_table, stream.hours_table)
    before = [one.lake.load(name).metadata for name in tables]
    for name in tables:
        admin.forget(one.lake, name)
    assert f"`anabranch apply {one.name} --register`" in call(one, "apply", one.name, expect=2)
    assert call(one, "apply", one.name, "--register").count("registered table") == 3
    assert [one.lake.load(name).metadata for name in tables] == before
    newest = one.lake.load(stream.table)
    delete_files(newest.io, [newest.metadata_location])
    with pytest.raises(MetadataGone, match=re.escape(newest.metadata_location.rpartition("/")[2])):
        one.lake.load(stream.table)
    expected = newest.metadata.metadata_log[-1].metadata_file
    assert expected in call(one, "apply", one.name, "--register")
    assert one.lake.load(stream.table).metadata_location == expected


def _without(columns: dict[str, Any], unlike: tuple[str, ...]) -> dict[str, Any]:
    """A row of the ledger without these columns and fields of columns."""
    kept = {name: value for name, value in columns.items() if name not in unlike}
    return {
        name: _without(value, unlike) if isinstance(value, dict) else value
        for name, value in kept.items()
    }


def _in_common_words(one: World, hours: dict[str, str], audit: Any) -> Report:
    """The contents of the tables without what differs by stream: ids, times, names."""
    state, topic = one.state, one.described
    own = {**hours, one.name: "STREAM", topic.id: "TOPIC"}
    decisions = one.job.ledger.history()
    unlike = ("decision_id", "recorded_at", "began", "at", "bytes", "snapshot_id", "sequence")
    refs = [name for name in state.table.metadata.refs if not name.startswith("main-")]
    columns = ("kafka_partition", "kafka_offset", "event_id", "level", "ingest_hour")
    of_dead = ("kafka_partition", "kafka_offset", "ingest_hour", "layer")
    contents = {
        "branches": sorted(refs),
        "rows": {
            branch: sorted(tuple(row[column] for column in columns) for row in one.rows(branch))
            for branch in ("main", "speed", "batch")
        },
        "dead": [tuple(letter[column] for column in of_dead) for letter in one.dead()],
        "position": state.position.offsets,
        "accepted": {hour: to_json(accepted) for hour, accepted in state.accepted.items()},
        "ledger": [_without(row.as_columns(), unlike) for row in decisions],
        "audit": audit,
    }
    text = json.dumps(contents, default=str, sort_keys=True)
    for word, common in own.items():
        text = text.replace(word, common)
    common_words: Report = json.loads(text)
    return common_words


@pytest.mark.parametrize("catalog", CATALOGS)
def test_the_story_ends_the_same_on_every_catalog(
    story: Callable[[str], Report], catalog: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="anabranch")
    contents = story(catalog)
    assert caplog.text and CREDENTIAL.partition(":")[2] not in caplog.text
    assert {"main", "speed", "batch", "staging", "first-r1"} <= set(contents["branches"])
    assert contents == story("SQLite")
