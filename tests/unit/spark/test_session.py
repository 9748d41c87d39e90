"""A session that opens on first use."""

import threading
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.spark.session import LazySpark


def test_a_session_opens_once_for_all_threads() -> None:
    opened: list[object] = []

    def open_session() -> SparkSession:
        opened.append(object())
        return cast(SparkSession, opened[-1])

    lazy, found = LazySpark(open_session), list[object]()
    assert lazy.opened is None
    threads = [threading.Thread(target=lambda: found.append(lazy())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [lazy.opened] * 8
    assert len(opened) == 1


def test_a_session_that_cannot_be_opened_is_tried_again() -> None:
    answers: list[Any] = [ConfigurationError("no workers"), cast(SparkSession, object())]

    def open_session() -> SparkSession:
        answer = answers.pop(0)
        if isinstance(answer, ConfigurationError):
            raise answer
        return cast(SparkSession, answer)

    lazy = LazySpark(open_session)
    with pytest.raises(ConfigurationError, match="no workers"):
        lazy()
    assert lazy() is lazy.opened


def test_an_error_without_spark_is_classified() -> None:
    lazy = LazySpark(lambda: cast(SparkSession, None))
    with pytest.raises(Transient), lazy.explained("rebuild an hour"):
        raise ConnectionResetError("connection reset by peer")
