"""Requirements of the batch layer on Kafka's log before it reads an hour."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from brokers import Broker
from lakes import new_environment, new_stream

from anabranch.common.errors import PositionError
from anabranch.offsets.hours import Cut, Timeline
from anabranch.offsets.position import Position
from batch_layer.sources import HourReader

HOUR = "2026-11-21T03"


def test_an_hour_whose_end_the_log_lost_is_not_read(tmp_path: Any) -> None:
    """The hour's ends were decided. Spark would wait for lost offsets, or read later ones."""
    broker = Broker(log={0: [1, 2, 3], 1: [1, 2]})
    environment = new_environment(tmp_path)
    job = SimpleNamespace(environment=environment, stream=new_stream(), kafka=broker.adapter)
    reader = HourReader(cast(Any, job), cast(Any, None), cast(Any, None))
    state = SimpleNamespace(timeline=Timeline(HOUR, HOUR, {}), position=Position("t", {0: 5, 1: 2}))
    found = rf"the end of hour {HOUR} .*lost published records: {{'0': \[3, 5\]}}"
    with pytest.raises(PositionError, match=found):
        reader.read(HOUR, Cut("t", {0: (0, 5), 1: (0, 2)}), cast(Any, state))
