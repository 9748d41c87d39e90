"""Egress to a real OpenSearch: every accepted record once in the index, whatever ends in between.

`make test-suite WHAT=search` runs it.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from accepted_hours import HOURS, accept, erase, four_hours
from killed import kill_at
from lakes import FIRST, StreamLake, new_environment, new_stream
from search_front import running_search_front
from search_server import running_search

from anabranch import config
from anabranch.common.errors import AnabranchError, ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.protocol import acts, deliveries
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.publisher import Publisher
from serving_layer import changes as feed
from serving_layer import egress as room
from serving_layer.changes import Token
from serving_layer.egress import search
from serving_layer.egress.hour import open_hour
from serving_layer.egress.search import open_search

INDEX = "accepted"
# Also in the separate processes that fail points kill: they import this module.
search.BULK_DOCUMENTS = 3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_search(tmp_path_factory.mktemp("search")) as address:
        yield address


@pytest.fixture(autouse=True)
def index(url: str) -> Iterator[str]:
    """The index, empty and of one shard."""
    address = f"{url}/{INDEX}"
    settings = {"settings": {"number_of_replicas": 0, "number_of_shards": 1}}
    requests.put(address, json=settings, timeout=60).raise_for_status()
    yield address
    requests.delete(address, timeout=60).raise_for_status()


def job_of(folder: Path, url: str, **access: str) -> Job:
    environment = new_environment(folder).model_copy(
        update={"search": config.SearchCluster.model_validate({"url": url, **access})}
    )
    target = {"name": "find", "index": INDEX}
    return Job(
        environment, new_stream(egress=[target]), Lake(environment), KafkaAdapter(environment.kafka)
    )


@pytest.fixture
def lake(tmp_path: Path, url: str) -> StreamLake:
    one = four_hours(tmp_path)
    stream = job_of(tmp_path, url).stream
    schema, settings = deliveries.DELIVERIES_SCHEMA, admin.TABLE_PROPERTIES
    admin.create(one.lake, stream.egress_table, schema, (), settings)
    return one


def run(folder: Path, url: str) -> list[Delivery]:
    """Deliver all that is to be delivered."""
    job = job_of(folder, url)
    return list(room.deliver(job, job.stream.egress[0]))


def found(index: str) -> list[tuple[str, int, int]]:
    """All documents of the index, as `StreamLake.rows`; each has the identity of its row."""
    requests.post(f"{index}/_refresh", timeout=60).raise_for_status()
    answer = requests.get(f"{index}/_search?size=1000", timeout=60).json()
    hits = [(hit["_id"], hit["_source"]) for hit in answer["hits"]["hits"]]
    assert all(key == f"t:{row['kafka_partition']}:{row['kafka_offset']}" for key, row in hits)
    return sorted((r["ingest_hour"], r["kafka_partition"], r["kafka_offset"]) for _, r in hits)


def in_main(lake: StreamLake, *hours: str) -> list[tuple[str, int, int]]:
    return sorted(row for row in lake.rows("main") if row[0] in hours)


@pytest.mark.parametrize(
    "at",
    [
        f"{Step.EGRESS_INDEXED.label}:1", f"{Step.EGRESS_INDEXED.label}:2",
        Step.EGRESS_DELIVERED.label, Step.LEDGER_PREPARED.label, Step.LEDGER_APPENDED.label,
        Step.EGRESS_RECORDED.label,
    ],
)  # fmt: skip
def test_a_kill_anywhere_leaves_each_once(lake: StreamLake, url: str, index: str, at: str) -> None:
    accept(lake, FIRST, 7)
    kill_at(at, run, lake.folder, url)
    run(lake.folder, url)
    assert found(index) == in_main(lake, FIRST)
    accept(lake, FIRST, 4)
    accept(lake, HOURS[2], 5)
    kill_at(at, run, lake.folder, url)
    if "indexed" in at:
        # The hazard: rows of the former revision are there.
        assert len([row for row in found(index) if row[0] == FIRST]) > 4
    run(lake.folder, url)
    assert found(index) == in_main(lake, FIRST, HOURS[2])
    assert len(found(index)) == 9
    assert run(lake.folder, url) == []
    erase(lake, 2)
    kill_at(at, run, lake.folder, url)
    run(lake.folder, url)
    assert found(index) == in_main(lake, FIRST, HOURS[2])
    assert len(found(index)) == 8
    assert run(lake.folder, url) == []


def test_the_later_read_stays_in_any_order(lake: StreamLake, url: str, index: str) -> None:
    accept(lake, FIRST, 7)
    job = job_of(lake.folder, url)
    (change,) = feed.poll(job, Token(job.stream.name))
    late = open_hour(job, change)
    assert late is not None
    with open_search(job, job.stream.egress[0]) as sleeper:  # type: ignore[arg-type]
        accept(lake, FIRST, 4)
        run(lake.folder, url)
        newer = "expected no later reading of partition 0, offset 0, found one"
        with pytest.raises(Transient, match=newer):
            sleeper.deliver(late, change.token, all_again=False)
    assert found(index) == in_main(lake, FIRST)
    assert len(found(index)) == 4


def test_after_a_restore_the_index_is_current(lake: StreamLake, url: str, index: str) -> None:
    """The hazard: documents of lost commits have higher versions, and some are no rows."""
    accept(lake, FIRST, 7)
    run(lake.folder, url)
    shutil.copy(lake.folder / "catalog.db", lake.folder / "backup.db")
    accept(lake, HOURS[2], 5)
    accept(lake, FIRST, 6)
    run(lake.folder, url)
    shutil.copy(lake.folder / "backup.db", lake.folder / "catalog.db")
    restored = replace(lake, lake=lake.again())
    accept(restored, HOURS[2], 4)
    run(lake.folder, url)
    assert found(index) == in_main(restored, FIRST, HOURS[2])
    assert len(found(index)) == 11


def test_hours_come_again_for_another_index(lake: StreamLake, url: str, index: str) -> None:
    for hour in (FIRST, HOURS[2]):
        accept(lake, hour, 4)
    assert [(d.hour, d.rows) for d in run(lake.folder, url)] == [(FIRST, 4), (HOURS[2], 4)]
    acts.serve_hour(Publisher(lake.lake, lake.stream), FIRST, "speed", "a test")
    run(lake.folder, url)
    assert len(found(index)) == 14
    table = job_of(lake.folder, url).stream.egress_table
    lake.lake.catalog.drop_table(table)
    admin.create(lake.lake, table, deliveries.DELIVERIES_SCHEMA, (), admin.TABLE_PROPERTIES)
    assert len(run(lake.folder, url)) == 2
    assert found(index) == in_main(lake, FIRST, HOURS[2])
    requests.delete(index, timeout=60).raise_for_status()
    with pytest.raises(ConfigurationError, match=f"expected the index {index}, found none"):
        run(lake.folder, url)
    requests.put(index, timeout=60).raise_for_status()
    assert len(run(lake.folder, url)) == 2
    assert found(index) == in_main(lake, FIRST, HOURS[2])


def test_a_refused_document_delays_its_hour(lake: StreamLake, url: str, index: str) -> None:
    requests.delete(index, timeout=60).raise_for_status()
    mapping = {"mappings": {"properties": {"ingest_hour": {"type": "integer"}}}}
    requests.put(index, json=mapping, timeout=60).raise_for_status()
    accept(lake, FIRST, 4)
    refused = rf"{index}: expected the document of partition 0, offset 0 .* 400 mapper_parsing"
    with pytest.raises(Refused, match=refused):
        run(lake.folder, url)
    # A refused document is refused again, and not taken for delivered.
    with pytest.raises(AnabranchError):
        run(lake.folder, url)
    requests.delete(index, timeout=60).raise_for_status()
    requests.put(index, timeout=60).raise_for_status()
    assert len(run(lake.folder, url)) == 1
    assert found(index) == in_main(lake, FIRST)


def test_a_busy_engine_behind_tls_and_a_key_gets_each_document_once(
    lake: StreamLake, url: str, index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(lake, FIRST, 9)
    with running_search_front(url, "the-key", tmp_path) as front:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", front.ca)
        job = job_of(lake.folder, front.url, api_key="the-key")
        assert [d.rows for d in room.deliver(job, job.stream.egress[0])] == [9]
        # The hour's ten places, nine rows and one that has none: four bulks of three at most, and
        # one more for each time that some were not known to be taken.
        assert front.did == [
            "refused", "halved", "lost", "answered", "answered", "answered", "answered",
        ]  # fmt: skip
        assert found(index) == in_main(lake, FIRST)
        accept(lake, FIRST, 4)
        for key, ca, expected in (
            ("another", front.ca, "expected permission, found 401 .*security_exception"),
            (
                "the-key",
                requests.certs.where(),
                "certificate verify failed.*; check search.url and REQUESTS_CA_BUNDLE",
            ),
            ("the-key", f"{tmp_path}/none.pem", "check REQUESTS_CA_BUNDLE"),
        ):
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", ca)
            job = job_of(lake.folder, front.url, api_key=key)
            with pytest.raises(ConfigurationError, match=expected):
                list(room.deliver(job, job.stream.egress[0]))
    assert len(found(index)) == 9


def test_a_large_request_is_sent_in_parts(lake: StreamLake, url: str, index: str) -> None:
    from serving_layer.egress.hour import Identity
    from serving_layer.egress.search import Index, document

    client = Index(config.SearchCluster(url=url), INDEX)
    row = {"kafka_partition": 0, "ingest_hour": FIRST, "text": "x" * 20_000}
    client.send([document(Identity("t"), (0, o, row | {"kafka_offset": o}), 1) for o in range(7)])
    assert len(found(index)) == 7
    large = r"partition 0, offset 8 .* exceeds the maximum size of a request"
    with pytest.raises(Refused, match=large):
        client.send([document(Identity("t"), (0, 8, row | {"text": "x" * 70_000}), 1)])
    client.close()
