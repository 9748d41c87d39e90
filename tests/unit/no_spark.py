"""The session of a job that must not start Spark, and what replaces it."""

from types import SimpleNamespace
from typing import Any

from lakes import StreamLake
from pyspark.sql import SparkSession

from anabranch.offsets.hours import Cut, shift
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.state import State
from anabranch.spark.session import LazySpark
from batch_layer.build import Built
from batch_layer.passes import Passes


def _refuse() -> SparkSession:
    raise AssertionError("expected no use of Spark")


NO_SPARK = LazySpark(_refuse)


class Hours:
    """Replaces what reads and stages hours by Spark: of each its first record. A build changes the
    hour's events; `again`: the hours that were rebuilt for those of another one."""

    def __init__(self, lake: StreamLake) -> None:
        self._lake = lake
        self.reader: Any = SimpleNamespace(repairable=dict)
        self.passes = Passes(NO_SPARK)
        self.again: list[str] = []

    def build(self, hour: str, cut: Cut, before: int, state: State) -> Built:
        rows = self._lake.stage([(hour, 0, cut.starts[0])])
        account = HourAccount(good=1, dead=0, duplicate=0, gap=cut.offsets - 1)
        return Built(hour, cut, before, rows, None, account)

    def changes_events(self, built: Built, state: State) -> bool:
        return True

    def recheck_duplicates(
        self, hour: str, cut: Cut, before: int, state: State, together: object
    ) -> Built | None:
        self.again.append(hour)
        return self.build(hour, cut, before, state)

    def lookback(self, hour: str) -> list[str]:
        return [shift(hour, -1)]
