"""The status page of 50 streams with five years of hours: what it sends does not grow."""

from datetime import UTC, datetime, timedelta

import pytest
from pages import browser, five_years, named, new_page, parsed, show
from proofs import job, new_proof

from anabranch.offsets.hours import hours_between, shift
from anabranch.operations.page.app import Page

AS_OF = datetime(2026, 11, 30, 23, 30, tzinfo=UTC)
STREAMS = 50
OPEN = "2026-11-30T23"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    one = job(new_proof(tmp_path_factory.mktemp("lake")))
    names = [f"stream_{i:02}" for i in range(STREAMS)]
    made = new_page(*(named(one, name) for name in names), now=lambda: AS_OF + timedelta(seconds=3))
    show(made, AS_OF, *(five_years(name, AS_OF) for name in names))
    return made


def test_the_streams_are_one_line_each_and_no_request_reads_one(page: Page) -> None:
    html = browser(page).get("/")
    assert len(parsed(html.text).all("tr")) == 1 + STREAMS
    assert len(html.content) < 2_000 + STREAMS * 1_200
    # The lake's folder is another table's, and no Kafka runs: no request reads a stream.
    assert browser(page).get("/streams/stream_07").status_code == 200
    assert all(reader.reading.failure is None for reader in page.readers.values())


def test_a_calendar_is_a_month_and_the_years_are_links(page: Page) -> None:
    first = five_years("stream_00", AS_OF).status.first_hour
    client = browser(page)
    for path in ("/streams/stream_00", "/streams/stream_00?month=2024-02"):
        answer = client.get(path)
        html = parsed(answer.text)
        hours = [a for a in html.all("a") if (a.get("id") or "").startswith("h2")]
        assert len(hours) in (29 * 24, 30 * 24)
        months = [a for a in html.all("a") if (a.get("id") or "").startswith("m2")]
        assert (months[-1]["id"], len(months)) == ("m2021-12", 60)
        assert len(answer.content) < 200_000
    assert first[:7] == "2021-12"


def test_a_stream_remembers_hours_that_are_not_accepted(page: Page) -> None:
    """A batch layer that was down for years: its hours are all named; a month is a month."""
    waiting = hours_between(shift(OPEN, -3 * 365 * 24), OPEN)
    stuck = five_years("stream_01", AS_OF, backlog=waiting, hours=dict.fromkeys(waiting, "speed"))
    show(page, AS_OF, stuck)
    client = browser(page)
    assert len(client.get("/").content) < 2_000 + STREAMS * 1_200
    answer = client.get("/streams/stream_01")
    assert len(answer.content) < 200_000
    assert "found 26280 waiting, from " in answer.text
    assert answer.text.count(": sealed, served by speed") == 719
    show(page, AS_OF, five_years("stream_01", AS_OF))
