"""Keys of S3 that are renewed while a process runs, and a private authority's server."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from authority import new_authority
from flaky_s3 import running_flaky_s3
from pyspark.sql import SparkSession
from s3_proxy import running_s3_proxy
from shared_keys import shared_keys

from anabranch.common.errors import AnabranchError, ConfigurationError, Transient
from anabranch.common.remote_errors import explain
from anabranch.config import S3, Environment
from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from anabranch.dev.services.processes import HOST
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.s3 import ObjectStore, open_store
from anabranch.spark.session import require_trust

PLACE = "s3://tests/one.parquet"


def _files(s3: S3) -> LakeFileIO:
    """File access as tables have it; a copy, as Python workers get."""
    catalog = {"name": "lake", "uri": "sqlite:///nowhere.db", "warehouse": "s3://tests/warehouse"}
    given = {"kafka": {"bootstrap_servers": f"{HOST}:9"}, "catalog": catalog}
    settings = Environment.model_validate(given).model_copy(update={"s3": s3})
    made = LakeFileIO(catalog_properties(settings))
    copied: LakeFileIO = pickle.loads(pickle.dumps(made))
    return copied


def _write(s3: S3) -> None:
    with _files(s3).new_output(PLACE).create() as stream:
        stream.write(b"abcde")


def _read(s3: S3) -> None:
    with _files(s3).new_input(PLACE).open() as stream:
        assert stream.read() == b"abcde"


def _ask(s3: S3) -> None:
    assert [key for key, _, _ in open_store(s3).list_objects("tests", "one")] == ["one.parquet"]


REQUESTS = (_write, _read, _ask)


def _failure(request: Callable[[S3], None], s3: S3) -> AnabranchError:
    with pytest.raises((OSError, AnabranchError)) as raised:
        request(s3)
    return explain("use S3", raised.value)


def test_keys_that_were_renewed_are_used_at_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = shared_keys(tmp_path, monkeypatch, ACCESS_KEY, SECRET_KEY)
    renew("first")
    with running_s3_proxy(tmp_path) as port, running_flaky_s3(port, seed=1) as front:
        s3 = S3(endpoint=f"http://{HOST}:{front.port}")
        open_store(s3).ensure_bucket("tests")
        for request in REQUESTS:
            request(s3)
        front.expired.add("first")
        for request in REQUESTS:
            assert type(_failure(request, s3)) is Transient
        assert "; renew the temporary keys of S3" in str(_failure(_write, s3))
        assert "; renew the temporary keys of S3" in str(_failure(_ask, s3))
        renew("second")
        for request in REQUESTS:
            request(s3)
        renewed = {client for token, client in front.tokens if token == "second"}
        assert renewed == {"Boto3", "aws-sdk-cpp"}


def test_a_private_authority_is_trusted_by_its_file(tmp_path: Path, spark: SparkSession) -> None:
    authority = new_authority(tmp_path)
    with running_s3_proxy(tmp_path, authority) as port:
        keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        keys |= {"endpoint": f"https://{HOST}:{port}"}
        trusted = S3.model_validate(keys | {"ca": str(authority.file)})
        ObjectStore(trusted).ensure_bucket("tests")
        for request in REQUESTS:
            request(trusted)
        for others in ({}, {"ca": str(tmp_path / "none.pem")}):
            for request in (_write, _ask):
                failure = _failure(request, S3.model_validate(keys | others))
                assert type(failure) is ConfigurationError
                assert "; check s3.ca" in str(failure)
        # Java has another list, which this session's has not got it from.
        trust = "expected Java to trust its certificate"
        with pytest.raises(ConfigurationError, match=trust) as raised:
            require_trust(spark, trusted)
        assert "unable to find valid certification path" in str(raised.value)
    # A server that is down is no reason to end.
    require_trust(spark, trusted)
