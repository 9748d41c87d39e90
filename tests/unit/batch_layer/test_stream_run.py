"""Order of hours in a job of many streams, and the number of hours at once."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from waiting import wait_for

from batch_layer.stream_run import OFFSETS_OF_A_PLACE, StreamTurns, Turns, places

H = [f"2026-11-21T{hour:02}" for hour in range(24)]
LARGE = 100 * OFFSETS_OF_A_PLACE


def turns(at_once: int) -> Turns:
    return Turns(at_once, lambda: cast(Any, object()))


class Streams:
    """Threads that take turns; each turn ends when the test says so."""

    def __init__(self, of: Turns) -> None:
        self._of = of
        self.began: list[str] = []
        self._ends: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []
        self.sessions: set[int] = set()
        self.working: set[str] = set()
        self.most = 0

    def add(self, name: str, hours: list[tuple[str, int | None]]) -> None:
        """A stream with a turn for each hour; returns once it waits for its first, or has it."""
        for hour, _ in hours:
            self._ends[f"{name} {hour}"] = threading.Event()
        own = StreamTurns(self._of, lambda session: self.sessions.add(id(session)))
        before = len(self._of._waiting) + len(self.began)
        thread = threading.Thread(target=self._work, args=(own, name, hours), daemon=True)
        self.threads.append(thread)
        thread.start()
        wait_for(lambda: len(self._of._waiting) + len(self.began) > before, f"{name} to wait")

    def _work(self, own: StreamTurns, name: str, hours: list[tuple[str, int | None]]) -> None:
        for hour, offsets in hours:
            with own.take(hour, offsets):
                self.working.add(name)
                self.most = max(self.most, len(self.working))
                self.began.append(f"{name} {hour}")
                assert self._ends[f"{name} {hour}"].wait(10)
                self.working.remove(name)

    def end(self, turn: str) -> None:
        """End a turn that began; what waits begins."""
        wait_for(lambda: turn in self.began, f"{turn} to begin")
        self._ends[turn].set()

    def end_all(self) -> list[str]:
        for event in self._ends.values():
            event.set()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        return self.began


@contextmanager
def busy(of: Turns) -> Iterator[None]:
    """Take all places, so that later hours wait."""
    session = of.take(0, "", of.at_once)
    yield
    of.give_back(session, of.at_once)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [(0, 1), (1, 1), (OFFSETS_OF_A_PLACE, 1), (OFFSETS_OF_A_PLACE + 1, 2), (LARGE, 4), (None, 4)],
)
def test_an_hour_takes_places_by_its_offsets(offsets: int | None, expected: int) -> None:
    assert places(offsets, 4) == expected


def test_streams_take_turns_the_oldest_hour_first() -> None:
    of = turns(1)
    streams = Streams(of)
    with busy(of):
        streams.add("long", [(hour, 1) for hour in H[:4]])
        streams.add("new", [(H[9], 1)])
        streams.add("old", [(H[0], 1), (H[1], 1)])
        streams.add("older", [("2026-11-20T05", 1)])
    first = ("older 2026-11-20T05", f"long {H[0]}", f"old {H[0]}", f"new {H[9]}")
    begun = [*first, f"long {H[1]}", f"old {H[1]}"]
    for turn in begun:
        streams.end(turn)
    assert streams.end_all() == [*begun, f"long {H[2]}", f"long {H[3]}"]
    assert streams.most == 1


def test_small_hours_go_side_by_side_and_a_large_one_alone() -> None:
    streams = Streams(turns(3))
    for name in ("a", "b"):
        streams.add(name, [(H[5], 10)])
    streams.add("large", [(H[1], LARGE)])
    # The large hour waits for all slots, and no later stream overtakes it.
    streams.add("c", [(H[6], 10)])
    assert (streams.began, streams.working) == ([f"a {H[5]}", f"b {H[5]}"], {"a", "b"})
    streams.end(f"a {H[5]}")
    assert streams.working <= {"a", "b"}
    streams.end(f"b {H[5]}")
    wait_for(lambda: streams.working == {"large"}, "the large hour alone")
    assert "c" not in streams.working
    assert streams.end_all() == [f"a {H[5]}", f"b {H[5]}", f"large {H[1]}", f"c {H[6]}"]


def test_places_share_their_sessions() -> None:
    of = turns(2)
    streams = Streams(of)
    with busy(of):
        for number in range(6):
            streams.add(f"s{number}", [(H[1], 1), (H[2], 1)])
    assert len(streams.end_all()) == 12 and streams.most <= 2
    assert len(streams.sessions) <= 2


def test_a_stream_that_pauses_frees_its_slot_and_continues_in_its_turn() -> None:
    of, order, stop = turns(1), list[str](), threading.Event()

    def paused() -> None:
        own = StreamTurns(of, lambda session: None)
        with own.take(H[0], 1):
            order.append("first try")
            own.pause(60, stop)
            order.append("second try")

    thread = threading.Thread(target=paused, daemon=True)
    thread.start()
    wait_for(lambda: order == ["first try"], "a try")
    with StreamTurns(of, lambda session: None).take(H[5], 1):
        order.append("another")
        stop.set()
        time.sleep(0.01)
        assert order == ["first try", "another"]
    thread.join(10)
    assert order == ["first try", "another", "second try"]
