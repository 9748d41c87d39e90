"""A catalog lost, a bucket restored, a warehouse moved: noticed, fixed by one command, exact.

Each stream has restated, refused and waiting hours, dead letters, and a position in the running hour.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import boto3
import pytest
from commands import call
from expectations import entry
from world import Make, World, add_catalog, closed_at_the_end, past_hour, spread

from anabranch.common.errors import MetadataGone, Terminal
from anabranch.iceberg.files import references

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


BAD = b"{"


@pytest.fixture
def make(tmp_path: Path, environment: dict[str, Any], spark: SparkSession) -> Iterator[Make]:
    """Makes streams with a catalog and a bucket of their own."""

    def new(uri: str | None = None) -> World:
        own = copy.deepcopy(environment)
        name = f"c{uuid.uuid4().hex[:12]}"
        own["catalog"] = {
            "name": name, "uri": uri or f"sqlite:///{tmp_path}/{name}.db", "warehouse": f"s3://{name}/warehouse"
        }  # fmt: skip
        made.append(World(tmp_path / name, own, spark))
        add_catalog(spark, made[-1].job.environment)
        return made[-1]

    with closed_at_the_end() as made:
        yield new


def begin_again(one: World) -> None:
    """As after a restart of all of our processes: no cached connection or table."""
    one.spark = one.spark.newSession()
    one.reopen()
    add_catalog(one.spark, one.job.environment)


def live(one: World) -> None:
    """Three past hours: restated, refused, and waiting; a dead letter; records of now."""
    one.expect(entry("expect_column_values_to_be_between", column="level", max_value=19))
    one.topic()
    one.send([*spread(past_hour(4), 20, "h4"), (0, _middle_of(4), BAD)])
    one.send(spread(past_hour(3), 30, "h3"))  # levels to 29: refused
    one.serve(spread(past_hour(2), 20, "h2"))
    for ago, decision in ((4, "accepted"), (3, "refused"), (2, "accepted")):
        assert [r.decision for r in one.batch(past_hour(ago))] == [decision]
    assert [r.revision for r in one.batch(past_hour(4), restate=True)] == [2]
    go_on(one, "before")
    assert one.apply() == []


def _middle_of(ago: int) -> Any:
    return spread(past_hour(ago), 1, "x")[0][1]


def go_on(one: World, prefix: str) -> None:
    one.send_now(10, prefix)
    one.speed()


def acknowledged(one: World) -> list[tuple[int, int, str]]:
    good = [record for record in one.sent if record.value != BAD]
    return sorted((r.partition, r.offset, json.loads(r.value or b"")["event_id"]) for r in good)


def end(one: World) -> None:
    """Everything that waits is done, and the end is what Kafka acknowledged, hour by hour."""
    go_on(one, "end")
    one.batch()
    results = one.batch(past_hour(3), accept=True, why="the rule was wrong")
    assert [r.decision for r in results] == ["accepted"]
    assert one.contents() == one.contents("speed") == acknowledged(one)
    assert [(d["kafka_partition"], bytes(d["value"])) for d in one.dead()] == [(0, BAD)]
    assert {one.decision(past_hour(ago)).decision for ago in (4, 3, 2, 1)} == {"accepted"}
    call(one, "audit", one.name, "--hours", f"{past_hour(4)}..{past_hour(1)}")
    assert call(one, "apply", one.name) == f"{one.name}: nothing to change\n"


def names(one: World) -> tuple[str, str, str]:
    stream = one.job.stream
    return stream.table, stream.dead_letters_table, stream.hours_table


class Bucket:
    """A stream's bucket, all of it copied aside and put back."""

    def __init__(self, one: World) -> None:
        self.name = urlparse(one.job.environment.catalog.warehouse).netloc
        s3 = one.job.environment.s3
        assert s3.access_key is not None and s3.secret_key is not None
        self.client: Any = boto3.client(
            "s3", endpoint_url=s3.endpoint, region_name=s3.region,
            aws_access_key_id=s3.access_key.get_secret_value(),
            aws_secret_access_key=s3.secret_key.get_secret_value(),
        )  # fmt: skip

    def objects(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def copy(self) -> dict[str, bytes]:
        return {
            key: self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
            for key in self.objects()
        }

    def restore(self, then: dict[str, bytes]) -> None:
        for key in set(self.objects()) - set(then):
            self.client.delete_object(Bucket=self.name, Key=key)
        for key, body in then.items():
            self.client.put_object(Bucket=self.name, Key=key, Body=body)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_lost_catalog_is_not_recreated_and_is_restored_by_one_command(
    make: Make, kind: str, request: pytest.FixtureRequest
) -> None:
    uri = None
    if kind == "postgresql":
        from postgres import DATABASE, PASSWORD, USER, running_postgres

        context = running_postgres()
        server = context.__enter__()
        request.addfinalizer(lambda: context.__exit__(None, None, None))
        uri = f"postgresql+psycopg2://{USER}:{PASSWORD}@127.0.0.1:{server.port}/{DATABASE}"
    one = make(uri)
    live(one)
    before = [one.lake.load(name).metadata for name in names(one)]
    if kind == "postgresql":
        server.execute("DROP TABLE iceberg_tables, iceberg_namespace_properties")
    else:
        Path(one.job.environment.catalog.uri.removeprefix("sqlite:///")).unlink()
    begin_again(one)
    # The hazard: the catalog has no tables, and Kafka's log would be read from its beginning.
    with pytest.raises(Terminal, match="expected it to exist, found none; run `anabranch apply`"):
        one.speed()
    output = call(one, "apply", one.name, expect=2)
    assert f"{one.name} --register`" in output and ".metadata.json" in output
    with pytest.raises(Terminal, match="expected it to exist"):
        one.speed()

    output = call(one, "apply", one.name, "--register")

    assert output.count("registered table") == 3
    assert [one.lake.load(name).metadata for name in names(one)] == before
    end(one)


def test_a_bucket_and_its_catalog_restored_to_one_moment_go_on_from_there(make: Make) -> None:
    one = make()
    live(one)
    database = Path(one.job.environment.catalog.uri.removeprefix("sqlite:///"))
    bucket = Bucket(one)
    then, position = bucket.copy(), one.state.position
    shutil.copy(database, database.with_suffix(".then"))
    go_on(one, "after")
    assert [r.hour for r in one.batch()] == [past_hour(3), past_hour(1)]
    bucket.restore(then)
    shutil.copy(database.with_suffix(".then"), database)
    begin_again(one)
    # The hazard: later publishes and acceptances are gone.
    assert one.state.position == position
    assert not one.state.is_accepted(past_hour(1))
    assert len(one.contents()) == len(acknowledged(one)) - 10
    end(one)


def test_a_bucket_restored_beneath_a_newer_catalog_is_reported_and_registered(make: Make) -> None:
    one = make()
    live(one)
    bucket = Bucket(one)
    then, position = bucket.copy(), one.state.position
    # More than the 20 metadata files that are kept: those of then are no longer in the log.
    for i in range(11):
        go_on(one, f"after{i}")
    named = one.lake.load(one.job.stream.table).metadata_location
    bucket.restore(then)
    begin_again(one)
    gone = r"expected the metadata file that the catalog names.*--register"
    with pytest.raises(MetadataGone, match=gone):
        one.speed()
    output = call(one, "apply", one.name, expect=2)
    assert named.rpartition("/")[2] in output
    assert f"registered table {one.job.stream.table}" in call(one, "apply", one.name, "--register")
    assert one.state.position == position
    end(one)


def test_a_warehouse_that_moves_to_another_bucket(make: Make, tmp_path: Path) -> None:
    one = make()
    live(one)
    old = Bucket(one)
    catalog = one.job.environment.catalog
    new = f"{old.name}-new"
    before = {name: one.lake.load(name) for name in names(one)}
    old.client.create_bucket(Bucket=new)
    # Step 1: with the jobs stopped, Iceberg rewrites what holds paths, beside the table, and says
    # what belongs where.
    for name in names(one):
        [done] = one.spark.sql(
            f"CALL {catalog.name}.system.rewrite_table_path(table => '{name}', source_prefix => "
            f"'s3://{old.name}/', target_prefix => 's3://{new}/', staging_location => "
            f"'s3://{old.name}/moving/{name}/')"
        ).collect()
        # Step 2: copy them.
        where = urlparse(done["file_list_location"])
        for key in old.objects():
            if f"/{key}".startswith(where.path) and not key.endswith(("_SUCCESS", ".crc")):
                listed = old.client.get_object(Bucket=old.name, Key=key)["Body"].read().decode()
                for source, target in csv.reader(io.StringIO(listed)):
                    assert target.startswith(f"s3://{new}/warehouse/")
                    origin = {"Bucket": old.name, "Key": source.removeprefix(f"s3://{old.name}/")}
                    key = target.removeprefix(f"s3://{new}/")
                    old.client.copy_object(Bucket=new, Key=key, CopySource=origin)
    old.restore({})
    # Step 3: the new place in the configuration, an empty catalog, and the command.
    place = {"uri": f"sqlite:///{tmp_path}/moved.db", "warehouse": f"s3://{new}/warehouse"}
    one.set_environment(catalog=one.environment_file["catalog"] | place)
    begin_again(one)
    assert call(one, "apply", one.name, "--register").count("registered table") == 3
    for name, was in before.items():
        now = one.lake.load(name)
        assert not [path for path in references(now) if old.name + "/" in path]
        assert now.metadata.refs == was.metadata.refs
        assert [s.summary for s in now.snapshots()] == [s.summary for s in was.snapshots()]
    end(one)
