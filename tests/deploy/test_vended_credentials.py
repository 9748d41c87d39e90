"""A stream's whole life on keys that the catalog vends, and no other key of S3 in a process.

Keys and bearer tokens expire many times meanwhile (`tests/support/vending.py`).
"""

import pickle
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import call, paused_at, run, shown, started
from vending import Vending, running_vending
from waiting import wait_for
from world import World, past_hour, spread

from anabranch.common.fail_points import Step
from anabranch.dev.services.processes import HOST
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.parquet_writer import FileWriter, target_of

KEYS, BEARERS = 45.0, 30.0
BUCKET = "lake"
PATIENT = 300.0


@pytest.fixture
def vending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vending]:
    with running_vending(tmp_path, KEYS, BEARERS) as vending:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield vending


@pytest.fixture
def one(environment: dict[str, Any], vending: Vending, tmp_path: Path) -> Iterator[World]:
    own = environment | {
        "catalog": {"name": "lake", "warehouse": f"s3://{BUCKET}/warehouse", **vending.catalog},
        "s3": {"endpoint": f"http://{HOST}:{vending.s3.port}"},
        "spark": environment["spark"] | {"master": "local[2]"},
        "erasure": {"key": "a-secret-of-the-test-of-32-letters"},
    }
    egress = [{"name": "files", "root": f"file://{tmp_path}/out"}]
    one = World(tmp_path / "conf", own, None, egress=egress)  # type: ignore[arg-type]
    yield one
    one.kafka.close()


def without_keys(vending: Vending) -> set[str]:
    """Return the clients that sent requests without keys."""
    return {client for (token, client) in vending.s3.tokens if token == ""}


@pytest.mark.timeout(1500)
def test_a_whole_life_on_vended_keys(one: World, vending: Vending, tmp_path: Path) -> None:
    hours = [past_hour(3), past_hour(2)]
    one.topic()
    for hour in hours:
        one.send(spread(hour, 40, hour))
    # Step 1: the doctor before and after `apply`.
    assert "s3.rights" not in call(one, "doctor", one.name, "--output", "json", expect=None)
    call(one, "apply", one.name)
    assert shown(one, "doctor", one.name)["ready"]
    # Step 2: the speed layer, killed, and then for longer than its keys live.
    for part, seconds in (("killed", 0.0), ("again", KEYS * 1.3)):
        with started(one, "speed", one.name) as speed:
            one.send_now(10, f"{part}-first")
            speed.until(lambda: one.published == len(one.sent), "a publish", PATIENT)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                one.send_now(10, f"{part}-{len(one.sent)}")
                speed.until(lambda: one.published == len(one.sent), "a publish", PATIENT)
                time.sleep(2)
            if part == "again":
                assert speed.terminate() == 0, speed.log[-4000:]
    assert one.contents() == one.acknowledged()
    # Step 3: one hour by Python workers, one by Spark's writer, whose keys expire before it stages.
    run(one, "batch", one.name, "--hour", hours[0])
    one.configure(files={"sort": ["event_id"]})
    call(one, "apply", one.name)
    given = ("batch", one.name, "--hour", hours[1])
    with paused_at(one, Step.BATCH_DECODED, *given, seconds=PATIENT) as batch:
        begun = max(vending.keys.values())
        wait_for(lambda: time.time() > begun, "the keys to expire", KEYS + 5)
        batch.resume()
        assert batch.wait() == 0, batch.log[-4000:]
    assert {one.state.served_by(hour) for hour in hours} == {"batch"}
    assert one.contents() == one.acknowledged()
    # Step 4: what reads, and what deletes.
    counted = run(one, "query", f"SELECT count(*) AS n FROM {one.job.stream.table}")
    assert str(len(one.sent)) in counted
    call(one, "audit", one.name, "--hours", "..".join(hours))
    run(one, "egress", one.name)
    erased, values = f"{hours[0]}-0", tmp_path / "values"
    values.write_text(f"{erased}\n")
    erase = ("erase", one.name, "--by", "event_id", "--values", str(values), "--why", "the test")
    run(one, *erase)
    run(one, "maintain", one.name)
    call(one, *erase)
    left = [row for row in one.acknowledged() if row[2] != erased]
    assert one.contents() == left
    assert shown(one, "doctor", one.name)["ready"]
    # Step 5: the clock alone asks without keys, and no request had expired ones.
    assert without_keys(vending) <= {"Boto3"}
    assert vending.s3.counts["expired"] == 0
    assert {"Boto3", "aws-sdk-cpp", "s3fileio"} <= {client for _, client in vending.s3.tokens}


def test_a_file_outlives_the_keys_with_which_it_was_begun(
    one: World, vending: Vending, monkeypatch: pytest.MonkeyPatch
) -> None:
    vending.lifetime = 3.0
    one.create()
    table = one.lake.load(one.job.stream.table)
    target = pickle.loads(pickle.dumps(target_of(table)))
    files = FileWriter(target)
    rows = target.schema.empty_table()
    begun = dict(vending.keys)
    files._file((0, "2026-11-21T03"))
    wait_for(lambda: time.time() > max(begun.values()), "the keys to expire", 30)
    files.write(rows)
    [output] = files.close()
    assert len(table.io.new_input(output.path)) == output.size
    assert vending.s3.counts["expired"] == 0


def test_a_table_bucket_lists_nothing(one: World, vending: Vending, tmp_path: Path) -> None:
    vending.table_buckets = True
    one.topic()
    assert "not examined whether the catalog has lost table" in call(one, "apply", one.name)
    report = shown(one, "doctor", one.name)
    [finding] = [f for f in report["findings"] if f["check"] == "s3.rights"]
    assert report["ready"] and finding["severity"] == "warning"
    one.send_now(10, "a")
    run(one, "speed", one.name, "--available-now")
    assert one.contents() == one.acknowledged()
    assert "no orphan is deleted" in run(one, "maintain", one.name)
    values = tmp_path / "values"
    values.write_text("a-1\n")
    erase = ("erase", one.name, "--by", "event_id", "--values", str(values), "--why", "the test")
    assert "expected an object store that lists and deletes" in call(one, *erase, expect=2)
    assert one.contents() == one.acknowledged()
    call(one, "audit", one.name)
    lost = next(path for files in files_by_hour(one.state.table, "main").values() for path in files)
    (tmp_path / "data" / lost.removeprefix("s3://")).unlink()
    assert lost in call(one, "audit", one.name, expect=1)


def test_loads_and_writes_share_connections(one: World, vending: Vending) -> None:
    one.create()
    before = Counter(vending.s3.connections)
    vending.s3.methods.clear()
    for number in range(20):
        table = one.lake.load(one.job.stream.table)
        location = f"{table.location()}/metadata/{number}.avro"
        with table.io.new_output(location).create() as stream:
            stream.write(b"abc")
        with table.io.new_input(location).open() as stored:
            assert stored.read() == b"abc"
        table.io.delete(location)
    assert vending.s3.methods == {"PUT": 20, "GET": 20, "POST": 20}
    assert vending.s3.connections - before == Counter()
