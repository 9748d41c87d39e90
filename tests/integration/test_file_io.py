"""The requests of S3 that a small file of PyIceberg costs; asking less loses nothing."""

import os
import socket
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import pytest
from flaky_s3 import FlakyS3, running_flaky_s3

from anabranch.common.errors import Transient
from anabranch.common.remote_errors import explain
from anabranch.config import S3, Environment
from anabranch.dev.services.processes import HOST, free_port
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO, _WholeFile, as_whole, remembering_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key


@pytest.fixture
def front(environment: dict[str, Any]) -> Iterator[FlakyS3]:
    port = urlparse(environment["s3"]["endpoint"]).port
    assert port is not None
    with running_flaky_s3(port, seed=1) as front:
        yield front


@pytest.fixture
def files(environment: dict[str, Any], front: FlakyS3) -> LakeFileIO:
    keys = {k: os.path.expandvars(environment["s3"][k]) for k in ("access_key", "secret_key")}
    s3 = {"endpoint": f"http://{HOST}:{front.port}", **keys}
    settings = Environment.model_validate(environment | {"s3": s3})
    ObjectStore(settings.s3).ensure_bucket("tests")
    front.methods.clear()
    return LakeFileIO(catalog_properties(settings))


def put(files: LakeFileIO, path: str, content: bytes) -> None:
    with files.new_output(path).create() as stream:
        stream.write(content)


def unreachable(port: int) -> S3:
    place = {"endpoint": f"http://{HOST}:{port}", "access_key": "nobody", "secret_key": "nothing"}
    return S3.model_validate(place)


@pytest.fixture
def folder(environment: dict[str, Any]) -> str:
    return f"{environment['catalog']['warehouse']}/files-{uuid.uuid4().hex}"


def test_the_lake_uses_it(environment: dict[str, Any]) -> None:
    lake = Lake(Environment.model_validate(environment))
    name = f"{LakeFileIO.__module__}.{LakeFileIO.__qualname__}"
    assert lake.catalog.properties["py-io-impl"] == name


def test_a_small_file_takes_one_request(files: LakeFileIO, front: FlakyS3, folder: str) -> None:
    file = files.new_output(f"{folder}/one.avro")
    with file.create() as stream:
        assert (stream.write(b"ab"), stream.write(b"cde"), stream.tell()) == (2, 3, 5)
    assert len(file) == 5
    assert front.methods == {"PUT": 1}
    with files.new_input(f"{folder}/one.avro").open() as written:
        assert written.read() == b"abcde"
    assert len(files.new_input(f"{folder}/one.avro")) == 5


@pytest.mark.parametrize("name", ["one.avro", "one.metadata.json", "one.parquet"])
def test_a_small_files_one_read(files: LakeFileIO, front: FlakyS3, folder: str, name: str) -> None:
    put(files, f"{folder}/{name}", b"abcde")
    # From the first deletion on, which a publish has: the library for it is there then.
    files.delete(f"{folder}/gone.avro")
    front.methods.clear()
    with as_whole(files, f"{folder}/{name}").open() as written:
        assert (written.read(2), written.seek(1), written.read(), written.tell()) == (
            b"ab", 1, b"bcde", 5,
        )  # fmt: skip
    assert front.methods == {"GET": 1}


@pytest.mark.parametrize("name", ["one.avro", "one.metadata.json"])
def test_inside_a_run_a_file_of_metadata_is_not_read_again(
    files: LakeFileIO, front: FlakyS3, folder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = f"{folder}/{name}", f"{folder}/other-{name}"
    files.delete(f"{folder}/gone.avro")
    put(files, other, b"xy")

    def read(location: str) -> bytes:
        with files.new_input(location).open() as stream:
            return stream.read()

    def requests(location: str) -> int:
        front.methods.clear()
        assert read(location) == {path: b"abcde", other: b"xy"}[location]
        return front.methods["GET"]

    with remembering_files():
        with files.new_output(path).create() as stream:
            stream.write(b"ab")
            stream.write(b"cde")
        assert [requests(path), requests(other), requests(other)] == [0, 1, 0]
        # A file that this process deleted is gone at once; one that another program deleted,
        # seconds later.
        files.delete(path)
        with pytest.raises(OSError):
            read(path)
        monkeypatch.setattr("anabranch.iceberg.file_io._REMEMBERED_SECONDS", 0.0)
        assert requests(other) == 1
    assert requests(other) == 1


def test_a_refused_read_is_another_librarys(files: LakeFileIO, front: FlakyS3, folder: str) -> None:
    put(files, f"{folder}/one.avro", b"abcde")
    files.delete(f"{folder}/gone.avro")
    front.faults, contents, refused = {"500": 0.3}, [], 0
    for _ in range(20):
        try:
            with files.new_input(f"{folder}/one.avro").open() as written:
                contents.append(written.read())
        except OSError:
            refused += 1
    assert set(contents) == {b"abcde"}
    assert refused < 5
    front.faults = {"500": 1.0}
    with pytest.raises(OSError):
        files.new_input(f"{folder}/one.avro").open()


def test_a_file_is_read_by_pyarrow_instead(files: LakeFileIO, folder: str) -> None:
    put(files, f"{folder}/one.avro", b"abcde")
    file = files.new_input(f"{folder}/one.avro")
    assert isinstance(file, _WholeFile)
    file.on_s3 = (ObjectStore(unreachable(free_port())), *bucket_and_key(file.location))
    with file.open() as written:
        assert written.read() == b"abcde"


def test_a_late_answer_of_s3_never_reaches_another_read(files: LakeFileIO, folder: str) -> None:
    put(files, f"{folder}/one.avro", b"abcde")
    file = files.new_input(f"{folder}/one.avro")
    assert isinstance(file, _WholeFile)
    # It accepts connections, and that is all.
    with socket.create_server((HOST, 0)) as silent:
        store = ObjectStore(unreachable(silent.getsockname()[1]), read_timeout=0.2)
        file.on_s3 = (store, *bucket_and_key(file.location))
        # PyArrow would have the content, and without an answer wait for it longer than a command
        # may take.
        with pytest.raises(TimeoutError, match="Read timeout") as raised:
            file.open()
    assert isinstance(explain("load the table", raised.value), Transient)


def test_a_large_file_is_written_whole(files: LakeFileIO, front: FlakyS3, folder: str) -> None:
    content = bytes(range(256)) * 4096 * 24
    with files.new_output(f"{folder}/large.parquet").create() as stream:
        for at in range(0, len(content), 1 << 20):
            stream.write(content[at : at + (1 << 20)])
    assert front.methods["POST"] > 0 and front.methods["PUT"] > 1
    with files.new_input(f"{folder}/large.parquet").open() as written:
        assert written.read() == content


def test_a_file_is_deleted_by_one_request(files: LakeFileIO, front: FlakyS3, folder: str) -> None:
    put(files, f"{folder}/a.avro", b"a")
    front.methods.clear()
    files.delete(f"{folder}/a.avro")
    assert front.methods == {"POST": 1}
    assert not files.new_input(f"{folder}/a.avro").exists()
    assert not files.new_input(folder).exists()
    with pytest.raises(FileNotFoundError):
        files.new_input(f"{folder}/a.avro").open()
    # Another publisher may have deleted it before.
    files.delete(f"{folder}/a.avro")


def test_a_write_that_s3_refuses_fails(files: LakeFileIO, front: FlakyS3, folder: str) -> None:
    front.faults = {"500": 1.0}
    with pytest.raises(OSError), files.new_output(f"{folder}/refused.avro").create() as stream:
        stream.write(b"a")
    with pytest.raises(OSError):
        files.delete(f"{folder}/refused.avro")
    front.faults = {}
    assert not files.new_input(f"{folder}/refused.avro").exists()
