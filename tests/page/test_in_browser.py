"""The status page in a real Chromium: axe finds nothing, keys go where they should, it renews itself.

With `PAGE_PICTURES=docs/images`, `make test-suite WHAT=page` draws the documentation's pictures.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import chromium
import pytest
import time_machine
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from lakes import StreamLake
from pages import HOSTS, five_years, folder_of, named, show
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from proofs import BEFORE, HOUR, NEXT, accept, bury, event, job, new_proof, read
from report_hours import ACCOUNT, LATER, accepted, kafka, sealed

from anabranch.offsets.hours import hours_between, shift
from anabranch.operations.page.app import Page as StatusPage
from anabranch.operations.page.app import Settings, listen
from anabranch.operations.reports.reading import Failure, TimedValue

AS_OF = datetime(2026, 11, 21, 15, 42, 10, tzinfo=UTC)
OPEN = "2026-11-21T15"
PATHS = ("/", "/streams/orders", f"/streams/events/hours/{NEXT}", "/nope")


class Clock:
    def __init__(self) -> None:
        self.now = AS_OF + timedelta(seconds=4)

    def __call__(self) -> datetime:
        return self.now


CLOCK = Clock()


def an_hour_accepted_by_choice(one: StreamLake) -> None:
    """An hour of every report: a failed gate, a difference, a duplicate, a dead letter, a gap."""
    sealed(one)
    before = [event(0, o, HOUR) for o in range(4)]
    read(one, [*before, event(0, 4), event(0, 5, id="0-2"), event(0, 7, n=1), event(0, 8)], {0: 10})
    accept(one, HOUR, BEFORE, before)
    why = "accepted by choice: the game sends no level on this day"
    accepted(
        one, [event(0, 4), event(0, 7, n=2), event(0, 9)], 1, snapshot_id=6012433512345678901,
        reason=why, **ACCOUNT,
    )  # fmt: skip
    bury(one, [(NEXT, 0, 6)])


@pytest.fixture(scope="module")
def status_page(tmp_path_factory: pytest.TempPathFactory) -> StatusPage:
    """Six streams, each in another condition; of one, a lake with every kind of report."""
    with time_machine.travel(LATER, tick=False):
        one = new_proof(tmp_path_factory.mktemp("lake"))
        an_hour_accepted_by_choice(one)
        full = replace(job(one), kafka=kafka())
        groups = {
            "orders": "shop", "payments": "shop", "clicks": "web", "flights": None, "logins": "web",
        }  # fmt: skip
        jobs = [full, *(named(full, name, group) for name, group in groups.items())]
        made = StatusPage(folder_of(*jobs), Settings(every=timedelta(seconds=1)), CLOCK)
        made.readers["events"].refresh()
    refused = [shift(OPEN, -3), shift(OPEN, -11)]
    backlog = sorted([*refused, shift(OPEN, -1)])
    layers = dict.fromkeys(hours_between(shift(OPEN, -48), OPEN), "batch")
    show(
        made,
        AS_OF,
        five_years(
            "orders",
            AS_OF,
            open_hour=shift(OPEN, 0),
            backlog=backlog,
            refused=sorted(refused),
            hours=layers | dict.fromkeys(backlog, "speed") | {shift(OPEN, -20): "speed"},
            newest_accepted=shift(OPEN, -2),
            complete_through=shift(OPEN, -12),
            lost={"2026-11-09T14": 312},
        ),
        five_years("payments", AS_OF),
        five_years(
            "clicks",
            AS_OF,
            late="1,204,551 offsets wait, and the position has not moved for 0:14:02",
            position_since=AS_OF - timedelta(seconds=842),
        ),
        five_years(
            "logins", AS_OF, to_seal=hours_between(shift(OPEN, -4), OPEN),
            open_hour=shift(OPEN, -4), newest_accepted=shift(OPEN, -5),
            complete_through=shift(OPEN, -5),
        ),
    )  # fmt: skip
    error = "describe topic flights: KafkaTimeoutError: Unable to bootstrap (transient, try again)"
    away = Failure(AS_OF, error)
    held = five_years("flights", AS_OF)
    made.readers["flights"].reading = TimedValue(held, AS_OF - timedelta(minutes=6), away)
    return made


@pytest.fixture(scope="module")
def address(status_page: StatusPage) -> Iterator[str]:
    with served(status_page) as address:
        yield address


@contextmanager
def served(status_page: StatusPage) -> Iterator[str]:
    """The page at an address of its own; it shows what it was given: no thread of it runs."""
    with listen("127.0.0.1", 0) as socket:
        app = status_page.app(HOSTS)
        settings = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium.ensure(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chrome: Browser, address: str) -> Iterator[Page]:
    """A tab in which whatever the browser complains of fails the test."""
    context = chrome.new_context(base_url=address, viewport={"width": 1400, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert [c for c in complaints if "Failed to load resource" not in c] == []


def opened(tab: Page, path: str) -> Page:
    tab.goto(path)
    if "hours" in path:
        expect(tab.get_by_role("heading", name="Dead letters")).to_be_visible(timeout=30_000)
    return tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PATHS)
def test_axe_finds_nothing(tab: Page, path: str, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    found = Axe().run(opened(tab, path)).response["violations"]
    assert [(v["id"], v["impact"], [n["html"] for n in v["nodes"]][:3]) for v in found] == []


def test_the_page_requests_nothing_from_other_hosts(tab: Page, address: str) -> None:
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    for path in PATHS[:3]:
        opened(tab, path)
    assert asked and [url for url in asked if not url.startswith(address)] == []


def test_arrow_keys_go_from_hour_to_hour_and_the_calendar_is_one_stop(tab: Page) -> None:
    opened(tab, "/streams/orders")
    assert tab.locator(".calendar td a[tabindex='0']").count() == 1
    tab.locator(f"[id='h{OPEN}']").focus()
    for key, hour in (
        ("ArrowLeft", shift(OPEN, -1)), ("ArrowUp", shift(OPEN, -25)), ("Home", "2026-11-20T00"),
        ("ArrowLeft", "2026-11-20T00"), ("End", "2026-11-20T23"), ("ArrowDown", "2026-11-20T23"),
    ):  # fmt: skip
        tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.id") == f"h{hour}", key
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", level=1)).to_contain_text("2026-11-20T23")


def test_the_first_stop_is_a_way_past_the_head(tab: Page) -> None:
    opened(tab, "/")
    tab.keyboard.press("Tab")
    expect(tab.get_by_role("link", name="Skip to the content")).to_be_focused()
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "content"


def test_the_page_refreshes_without_moving_the_focus(tab: Page, status_page: StatusPage) -> None:
    opened(tab, "/")
    tab.locator("#s-payments").focus()
    before = status_page.readers["payments"].reading
    try:
        refused = five_years(
            "payments", AS_OF, refused=[shift(OPEN, -1)], backlog=[shift(OPEN, -1)]
        )
        show(status_page, AS_OF, refused)
        row = tab.locator("tr", has=tab.locator("#s-payments"))
        expect(row).to_contain_text("refused", timeout=15_000)
        expect(tab.locator("#news")).to_contain_text("6 streams, 6 to look at")
        expect(tab.locator("#s-payments")).to_be_focused()
    finally:
        status_page.readers["payments"].reading = before


def test_the_page_shows_that_the_server_is_down(tab: Page) -> None:
    opened(tab, "/")
    tab.route("**/*", lambda route: route.abort())
    down = "Not renewed: the page's server gave no answer since"
    expect(tab.locator("#connection")).to_contain_text(down)
    tab.unroute("**/*")
    expect(tab.locator("#connection")).to_have_text("", timeout=15_000)


def test_the_page_is_complete_without_javascript(chrome: Browser, address: str) -> None:
    context = chrome.new_context(base_url=address, java_script_enabled=False)
    page = context.new_page()
    page.goto("/streams/orders")
    assert page.locator(".calendar td a").count() == 20 * 24 + 16
    page.goto("/")
    expect(page.get_by_text("without JavaScript, reload it")).to_be_visible()
    context.close()


def test_groups_are_shown_with_the_streams_behind(tab: Page) -> None:
    summaries = opened(tab, "/").locator("summary").all_inner_texts()
    assert len(summaries) == 2
    assert f"complete through {shift(OPEN, -12)}, behind: orders" in summaries[0]
    assert f"complete through {shift(OPEN, -5)}, behind: logins" in summaries[1]


@pytest.mark.parametrize("width", [1400, 1920])
def test_nothing_of_the_streams_is_cut_and_a_row_is_one_line(tab: Page, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    opened(tab, "/")
    tab.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    over = "regions => regions.filter((r) => r.scrollWidth > r.clientWidth).length"
    assert tab.locator(".wide").evaluate_all(over) == 0
    rows = tab.locator(".streams tbody tr")
    heights = rows.evaluate_all("rows => rows.map((r) => r.offsetHeight)")
    assert len(heights) == 6 and max(heights) < 36


def test_a_section_that_was_folded_stays_so(tab: Page) -> None:
    opened(tab, "/")
    tab.locator("#section-group-shop summary").click()
    tab.evaluate("document.getElementById('live').dataset.old = 'yes'")
    CLOCK.now += timedelta(seconds=1)
    expect(tab.locator("#live[data-old]")).to_have_count(0, timeout=15_000)
    assert tab.locator("#section-group-shop").get_attribute("open") is None


def test_states_differ_by_more_than_colour(tab: Page) -> None:
    opened(tab, "/streams/orders")
    shown = {}
    for state in ("accepted", "refused", "sealed", "open"):
        cell = tab.locator(f".calendar td.{state} a").first
        shown[state] = cell.inner_text()
    assert shown == {"accepted": "A■", "refused": "R△", "sealed": "S△", "open": "O△"}


@pytest.fixture
def phone(tab: Page) -> Page:
    tab.set_viewport_size({"width": 390, "height": 844})
    return tab


@pytest.mark.parametrize("path", PATHS)
def test_a_phone_shows_all_of_it(phone: Page, path: str) -> None:
    """Only the inside of a scrolled region is wider than the window; captions are whole."""
    opened(phone, path)
    phone.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    right = "element => element.getBoundingClientRect().right"
    assert [c.inner_text() for c in phone.locator("caption").all() if c.evaluate(right) > 390] == []
    found = Axe().run(phone).response["violations"]
    assert [(v["id"], v["impact"], [n["html"] for n in v["nodes"]][:3]) for v in found] == []


def test_a_phone_shows_every_column_of_the_streams_by_its_name(phone: Page) -> None:
    opened(phone, "/")
    # In one question, since the page renews itself.
    cells = phone.evaluate(
        """Array.from(document.getElementById("s-orders").closest("tr").querySelectorAll("td"), (cell) => [
            getComputedStyle(cell, "::before").content, cell.getBoundingClientRect().right])"""
    )
    labels = [label for label, _ in cells]
    assert ['"Lag (offsets): "' in labels, '"Run: "' in labels, len(labels)] == [True, True, 9]
    assert max(right for _, right in cells) <= 390


def test_a_phone_begins_at_the_newest_hour_and_stays_there(phone: Page) -> None:
    opened(phone, "/streams/orders")
    newest = phone.locator(f"[id='h{OPEN}']")
    box = newest.evaluate("hour => hour.getBoundingClientRect().toJSON()")
    assert box["left"] > 0 and box["right"] <= 390
    region = phone.locator(".wide:has(> .calendar)")
    day = phone.locator(".calendar tbody th").first
    left = day.evaluate("day => day.getBoundingClientRect().left")
    assert left >= 0, "the day stays beside its hours"
    region.evaluate("region => { region.scrollLeft = 40; }")
    phone.evaluate("document.getElementById('live').dataset.old = 'yes'")
    expect(phone.locator("#live[data-old]")).to_have_count(0, timeout=15_000)
    assert region.evaluate("region => region.scrollLeft") == 40


@pytest.mark.skipif(
    "PAGE_PICTURES" not in os.environ, reason="draws pictures where PAGE_PICTURES says"
)
@pytest.mark.parametrize(
    ("name", "path", "media"),
    [
        ("streams", "/", {"color_scheme": "light"}),
        ("stream", "/streams/orders", {"color_scheme": "light"}),
        ("stream-dark", "/streams/orders", {"color_scheme": "dark"}),
        ("stream-print", "/streams/orders", {"media": "print"}),
        ("maintenance", "/streams/orders", {"color_scheme": "light"}),
        ("hour", f"/streams/events/hours/{NEXT}", {"color_scheme": "light"}),
    ],
)
def test_pictures(tab: Page, name: str, path: str, media: dict[str, str]) -> None:
    folder = Path(os.environ["PAGE_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    tab.emulate_media(**media)  # type: ignore[arg-type]
    opened(tab, path)
    file = folder / f"page-{name}.png"
    html = "document.documentElement"
    size = tab.evaluate(f"[{html}.scrollWidth, {html}.scrollHeight]")
    top = 0.0
    if name == "maintenance":
        top = tab.locator("section[aria-labelledby=maintenance]").bounding_box()["y"]  # type: ignore[index]
    clip = {"x": 0, "y": top, "width": size[0], "height": min(size[1] - top, 1500)}
    tab.screenshot(path=file, full_page=True, clip=clip)  # type: ignore[arg-type]
    # A fifth of the bytes, and the eye sees no difference.
    small = Image.open(file).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    small.save(file, optimize=True)
