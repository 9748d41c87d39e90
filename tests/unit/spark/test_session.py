"""A session that opens on first use, and one that ends before its workers have begun."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast
from unittest.mock import Mock

import pytest
from lakes import StreamLake
from pyspark.sql import SparkSession

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.spark.session import LazySpark
from speed_layer import job


def test_a_session_opens_once_for_all_threads() -> None:
    opened = list[object]()

    def open_session() -> SparkSession:
        opened.append(object())
        return cast(SparkSession, opened[-1])

    lazy = LazySpark(open_session)
    assert lazy.opened is None
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: lazy(), range(8))]
    assert found == [lazy.opened] * 8
    assert len(opened) == 1


def test_a_session_that_cannot_be_opened_is_tried_again() -> None:
    lazy = LazySpark(Mock(side_effect=[ConfigurationError("no workers"), object()]))
    with pytest.raises(ConfigurationError, match="no workers"):
        lazy()
    assert lazy() is lazy.opened


def test_an_error_without_spark_is_classified() -> None:
    lazy = LazySpark(lambda: cast(SparkSession, None))
    with pytest.raises(Transient), lazy.explained("rebuild an hour"):
        raise ConnectionResetError("connection reset by peer")


def test_spark_stops_after_the_start_of_its_workers(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: where nothing is to be read, Spark ends under a task, and logs a stack."""
    seen = list[str]()
    monkeypatch.setattr(job, "open_session", Mock())
    monkeypatch.setattr(job.workers, "require_workers", Mock())
    monkeypatch.setattr(job, "warm_up", lambda _: (time.sleep(0.1), seen.append("begun")))
    monkeypatch.setattr(job, "close_session", lambda _: seen.append("ended"))
    with job._session(lake.environment, "one"):
        pass
    assert seen == ["begun", "ended"]
