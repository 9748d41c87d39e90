"""Egress to a real HDFS: every accepted record once in its folders, whatever ends in between.

`make test-hdfs` runs it.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accepted_hours import HOURS, accept, four_hours
from hdfs_server import running_hdfs
from killed import kill_at
from lakes import FIRST, StreamLake, new_environment, new_stream

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.fail_points import Step
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.protocol import deliveries
from anabranch.protocol.deliveries import Delivery
from serving_layer import egress as room
from serving_layer.egress.manifest import BEGUN
from serving_layer.egress.storage import HdfsStorage, open_storage
from serving_layer.egress.webhdfs import WebHdfs

STEPS = [
    Step.EGRESS_BEGUN,
    Step.EGRESS_WRITTEN,
    Step.EGRESS_NAMED,
    Step.EGRESS_CLEARED,
    Step.EGRESS_DELIVERED,
    Step.EGRESS_RECORDED,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_hdfs(tmp_path_factory.mktemp("hdfs")) as address:
        yield address


@pytest.fixture
def hdfs(url: str) -> Iterator[WebHdfs]:
    with closing(WebHdfs(settings(url))) as client:
        yield client


def settings(url: str, user: str | None = None) -> config.Hdfs:
    """Return HDFS settings. The default user started the server and so owns the root."""
    return config.Hdfs(url=url, user=user or getpass.getuser())


def job_of(folder: Path, url: str) -> Job:
    environment = new_environment(folder).model_copy(update={"hdfs": settings(url)})
    target = {"name": "export", "type": "folder", "root": root_of(folder), "file_rows": 1000}
    return Job(
        environment, new_stream(egress=[target]), Lake(environment), KafkaAdapter(environment.kafka)
    )


def root_of(folder: Path) -> str:
    return f"hdfs:///exports/{folder.name}"


@pytest.fixture
def lake(tmp_path: Path, url: str) -> StreamLake:
    one = four_hours(tmp_path)
    stream = job_of(tmp_path, url).stream
    admin.create(
        one.lake, stream.egress_table, deliveries.DELIVERIES_SCHEMA, (), admin.TABLE_PROPERTIES
    )
    return one


def run(folder: Path, url: str) -> list[Delivery]:
    """Deliver all that is to be delivered."""
    job = job_of(folder, url)
    return list(room.deliver(job, job.stream.egress[0]))


def delivered(hdfs: WebHdfs, lake: StreamLake, hour: str) -> list[tuple[int, int]]:
    """Return the offsets that a reader listing an hour's folder reads. Assert that the manifest and
    `_SUCCESS` agree."""
    folder = f"/exports/{lake.folder.name}/date={hour[:10]}/hour={hour[11:]}"
    manifest = json.loads(hdfs.read(f"{folder}/_manifest.json") or b"")
    assert hdfs.read(f"{folder}/_SUCCESS") == f"{manifest['delivery']}\n".encode()
    files = {f["name"] for f in manifest["files"]}
    # The announcement of a killed process stays until the next delivery of the hour; readers skip
    # `_` names.
    names = {name for name in hdfs.names(folder) if not name.startswith(BEGUN)}
    assert names == files | {"_manifest.json", "_SUCCESS"}
    tables = [
        pq.read_table(pa.BufferReader(hdfs.read(f"{folder}/{name}"))) for name in sorted(files)
    ]
    return [
        (r["kafka_partition"], r["kafka_offset"]) for table in tables for r in table.to_pylist()
    ]


def in_main(lake: StreamLake, hour: str) -> list[tuple[int, int]]:
    return [(p, o) for h, p, o in lake.rows("main") if h == hour]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.label)
def test_a_process_killed_anywhere_leaves_each_accepted_record_once(
    lake: StreamLake, url: str, hdfs: WebHdfs, step: Step
) -> None:
    accept(lake, FIRST, 7)
    kill_at(step.label, run, lake.folder, url)
    run(lake.folder, url)
    assert delivered(hdfs, lake, FIRST) == in_main(lake, FIRST)
    accept(lake, FIRST, 4)
    accept(lake, HOURS[2], 5)
    kill_at(step.label, run, lake.folder, url)
    own = f"/exports/{lake.folder.name}/date={FIRST[:10]}/hour={FIRST[11:]}"
    if step is Step.EGRESS_NAMED:
        # The hazard: the files of both revisions are there.
        assert len([name for name in hdfs.names(own) if name.endswith(".parquet")]) == 2
        assert "_SUCCESS" not in hdfs.names(own)
    run(lake.folder, url)
    for hour in (FIRST, HOURS[2]):
        assert delivered(hdfs, lake, hour) == in_main(lake, hour)
    assert len(in_main(lake, FIRST)) == 4
    assert run(lake.folder, url) == []


class Stalling(WebHdfs):
    """When it is about to rename a small file it waits for a while, and now and then it dies."""

    def __init__(self, settings: config.Hdfs, seed: int) -> None:
        super().__init__(settings)
        self.chance = random.Random(seed)
        self.died = 0

    def rename(self, path: str, to: str, overwrite: bool = False) -> bool:
        time.sleep(self.chance.random() / 10)
        if self.chance.random() < 0.2:
            self.died += 1
            raise Transient("killed")
        return super().rename(path, to, overwrite)


def test_each_concurrent_writer_replaces_the_version_it_read_or_is_refused(
    url: str, hdfs: WebHdfs
) -> None:
    """Each small file names the one that its writer had seen; so a write that took the place of
    another is missed."""
    path, seen = "hdfs:///small/_manifest.json", dict[str, str]()

    def write(seed: int) -> tuple[list[str], int]:
        taken = []
        with closing(Stalling(settings(url), seed)) as client:
            storage = HdfsStorage(client)
            for _ in range(15):
                before = storage.find(path)
                name = uuid4().hex
                seen[name] = before.body.decode() if before is not None else ""
                try:
                    if storage.replace(path, name.encode(), before):
                        taken.append(name)
                except Transient:
                    continue
            return taken, client.died

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(write, range(8)))
    assert sum(died for _, died in results) >= 3, "the hazard: writers end between two renames"
    last = HdfsStorage(hdfs).find(path)
    assert last is not None
    chain = [name := last.body.decode()]
    while name := seen[name]:
        chain.append(name)
    written = Counter(name for taken, _ in results for name in taken)
    assert len(written) > 10
    assert written <= Counter(chain), "successful writes form one chain"
    # Writers that lived leave no refused files behind.
    assert len(hdfs.names("/small")) <= 1 + sum(died for _, died in results)


def test_errors_of_hdfs_have_a_remedy(lake: StreamLake, url: str, hdfs: WebHdfs) -> None:
    hdfs.write("/closed/x", b"1")
    with closing(WebHdfs(settings(url, "stranger"))) as other:
        with pytest.raises(
            ConfigurationError,
            match=r"write hdfs:///closed/y: expected permission, found 403 .*stranger",
        ):
            other.write("/closed/y", b"2")
        assert other.read("/closed/none") is None
        assert other.names("/none") == frozenset()
    hdfs.delete("/closed/none")
    unreachable = url.rpartition(":")[0] + ":1"
    with (
        closing(WebHdfs(settings(unreachable))) as gone,
        pytest.raises(Transient, match="try again"),
    ):
        gone.read("/x")
    bare = new_environment(lake.folder)
    with (
        pytest.raises(ConfigurationError, match="expected `hdfs:` with the name node's url"),
        open_storage(bare, root_of(lake.folder)),
    ):
        pass


def test_names_with_any_character_and_files_of_some_size(hdfs: WebHdfs) -> None:
    body = os.urandom(3_000_000)
    for name in ("date=2026-11-20/ä b+c%25&d.parquet", "plain"):
        hdfs.write(f"/any/{name}", body)
        assert hdfs.read(f"/any/{name}") == body
        assert hdfs.rename(f"/any/{name}", f"/any/{name}.moved")
        assert not hdfs.rename(f"/any/{name}", f"/any/{name}.moved")
    assert hdfs.names("/any/date=2026-11-20") == {"ä b+c%25&d.parquet.moved"}
