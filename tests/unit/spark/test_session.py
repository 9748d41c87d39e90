"""A session that opens on first use."""

from concurrent.futures import ThreadPoolExecutor
from typing import cast
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.spark.session import LazySpark


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
