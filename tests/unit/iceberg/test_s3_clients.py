"""When a process opens another client of S3: for other settings, and for keys that were renewed."""

import os
from contextlib import suppress
from http.server import ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber
from pyarrow.fs import S3FileSystem
from servers import QuietHandler, in_threads

from anabranch.common.counters import S3_BYTES, Tally, counting
from anabranch.common.errors import AnabranchError
from anabranch.config import S3
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.s3 import open_store, shared_files

NOWHERE = "https://127.0.0.1:9"
PROPERTIES = {"s3.endpoint": NOWHERE, "s3.region": "us-east-1"}


def _file_system(io: LakeFileIO) -> S3FileSystem:
    opened = io.fs_by_scheme("s3", "bucket")
    assert isinstance(opened, S3FileSystem)
    return opened


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """AWS's shared files, by the variables that name them. Only the first exists."""
    files = {name: tmp_path / name for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")}
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    keys = "[default]\naws_access_key_id=a\naws_secret_access_key=b\n"
    files["AWS_SHARED_CREDENTIALS_FILE"].write_text(keys)
    return files


@pytest.mark.parametrize("name", ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
@pytest.mark.parametrize("how", ["replaced", "written again"])
def test_clients_are_kept_till_a_file_changes(shared: dict[str, Path], name: str, how: str) -> None:
    s3, io = S3(endpoint=NOWHERE), LakeFileIO(PROPERTIES)
    store, files = open_store(s3), _file_system(io)
    assert (open_store(s3), _file_system(io)) == (store, files)
    file = shared[name]
    text = "[default]\naws_access_key_id=c\naws_secret_access_key=d\n"
    if how == "replaced":
        new = file.with_suffix(".new")
        new.write_text(text)
        new.replace(file)
    else:
        file.write_text(text)
        os.utime(file, ns=(1, 1))
    assert open_store(s3) is not store
    assert _file_system(io) is not files


def test_missing_shared_files_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "")
    monkeypatch.setenv("AWS_CONFIG_FILE", "~nobody-of-this-name/config")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shared_files() == ((0, 0), (0, 0))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").touch()
    assert shared_files()[0] != (0, 0)


@pytest.mark.parametrize(("without", "expected"), [("", ["boto3", "pyarrow"]), ("s3.test", [])])
def test_both_clients_use_the_environments_proxy(
    monkeypatch: pytest.MonkeyPatch, without: str, expected: list[str]
) -> None:
    asked = []

    class Proxy(QuietHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with in_threads(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as port:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("NO_PROXY", without)
        endpoint, keys = "http://s3.test:9000", {"access_key": "a", "secret_key": "b"}
        named = {"s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.connect-timeout": "1"}
        with suppress(AnabranchError):
            open_store(S3.model_validate({"endpoint": endpoint, **keys})).has_bucket("boto3")
        io = LakeFileIO(PROPERTIES | {"s3.endpoint": endpoint} | named)
        with suppress(OSError):
            _file_system(io).get_file_info("pyarrow/x")
    names = {path.removeprefix(f"{endpoint}/").partition("/")[0] for path in asked}
    assert sorted(names) == expected


def test_pyarrow_gets_the_certificates_to_trust(tmp_path: Path) -> None:
    ca = str(tmp_path / "ca.pem")

    def options(**properties: str) -> dict[str, object]:
        _, ([options]) = _file_system(LakeFileIO(PROPERTIES | properties)).__reduce__()
        return dict(options)

    assert options()["tls_ca_file_path"] == ""
    assert options(**{"s3.ca": ca})["tls_ca_file_path"] == ca
    strategy = {"s3.retry-strategy-impl": "pyarrow.fs.AwsDefaultS3RetryStrategy"}
    assert options(**{"s3.ca": ca, **strategy})["tls_ca_file_path"] == ca
    assert options(**{"s3.ca": ca})["allow_delayed_open"]


def test_bytes_of_an_object_that_may_be_absent_are_counted(shared: dict[str, Path]) -> None:
    store, tally = open_store(S3(endpoint=NOWHERE)), Tally()
    with Stubber(store._client) as client, counting(tally):
        body = StreamingBody(BytesIO(b"abcde"), 5)
        client.add_response("get_object", {"Body": body, "ETag": "one"})
        assert store.find("bucket", "key") == (b"abcde", "one")
        client.add_client_error("get_object", "NoSuchKey", http_status_code=404)
        assert store.find("bucket", "other") is None
    assert tally.totals()[S3_BYTES, "read"] == 5
