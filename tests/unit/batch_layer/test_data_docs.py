"""Data Docs from rows of the ledger: what a page says of each verdict, without a JVM."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from lakes import decide, new_environment, new_stream

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.protocol.ledger_row import Kind, LedgerRow, QualityResult
from batch_layer.quality.data_docs import NEWEST, build, plan_pages, publish
from batch_layer.quality.row_counts import PREVIOUS, SPEED
from batch_layer.quality.suite import Expectation
from batch_layer.quality.wording import describe_failure, describe_met

AT = datetime(2026, 11, 21, 4, 5, tzinfo=UTC)
BETWEEN = Expectation(
    "expect_column_values_to_be_between", {"column": "amount", "min_value": 0, "max_value": 10000}
)
UNIQUE = Expectation("expect_compound_columns_to_be_unique", {"column_list": ["a", "b"]})
REGEX = Expectation(
    "expect_column_values_to_match_regex", {"column": "player_id", "regex": "("}, "warning"
)
MET = (
    Expectation("expect_column_values_to_not_be_null", {"column": "event_id"}),
    Expectation(
        "expect_column_values_to_be_in_set", {"column": "game", "value_set": list(range(1000))}
    ),
    Expectation(PREVIOUS, {"min_ratio": 0.5, "days": 7}),
)
COUNT = Expectation(SPEED, {"min_ratio": 0.9, "max_ratio": 1.1, "min_value": 90, "max_value": 110})


def at(offset: int) -> dict[str, int]:
    return {"kafka_partition": 1, "kafka_offset": offset}


def verdict() -> dict[str, Any]:
    """A verdict of every kind, as it comes back from the ledger."""
    values = {
        "element_count": 100, "unexpected_count": 2, "partial_unexpected_list": [-5.0, -6.0],
        "partial_unexpected_index_list": [{"amount": -5.0} | at(7), {"amount": -6.0} | at(8)],
    }  # fmt: skip
    pairs = {
        "element_count": 100,
        "unexpected_count": 1,
        "partial_unexpected_list": [{"a": 3, "b": "x"}],
        "partial_unexpected_index_list": [{"a": 3, "b": "x"} | at(9)],
    }
    failed = (
        describe_failure(BETWEEN, values, None),
        describe_failure(UNIQUE, pairs, None),
        describe_failure(COUNT, {"observed_value": 50}, None, "the speed layer has 100"),
    )
    warning = describe_failure(REGEX, {}, "java.util.regex.PatternSyntaxException: Unclosed group")
    reason = "row counts of 3 previous days are needed, 0 of 7 are known"
    quality = QualityResult(
        passed=False,
        failed=tuple(f.as_dict() for f in failed),
        warnings=(warning.as_dict(),),
        evaluated=7,
        suite="game_events",
        met=tuple(map(describe_met, MET)),
        not_applicable=({"type": MET[2].type, "reason": reason},),
    )
    fields: dict[str, Any] = json.loads(json.dumps(quality.as_dict()))
    return fields


def row(hour: str, decision: Kind = "refused", quality: Any = None, revision: int = 1) -> LedgerRow:
    return decide(hour, decision, revision, None, AT, quality=quality)


def words(page: Path) -> str:
    """Return the text of a page without its markup."""
    text = re.sub(
        r"<(script|style).*?</\1>|<[^>]+>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return re.sub(r"\s+", " ", unescape(text))


def test_a_page_shows_each_verdict_with_rows(tmp_path: Path) -> None:
    rows = [
        row("2026-11-21T03", quality=verdict()),
        row("2026-11-21T04", "accepted", {**verdict(), "passed": True}),
    ]
    build("game_events", "games.game_events", rows, tmp_path)
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (
        "2026-11-21T03 revision 1 refused" in index and "2026-11-21T04 revision 1 accepted" in index
    )
    pages = sorted((tmp_path / "validations").rglob("*.html"))
    assert [page.stem for page in pages] == ["2026-11-21T03", "2026-11-21T04"]
    assert "values must never be null" in words(tmp_path / "expectations" / "game_events.html")
    text = words(pages[0])
    for expected in (
        "Data asset: games.game_events Status: Failed",
        "Evaluated Expectations 7",
        "Successful Expectations 3",
        "Unsuccessful Expectations 4",
        "values must be greater than or equal to 0 and less than or equal to 10000",
        "2 unexpected values found. 2% of 100 total rows.",
        "partition 1, offset 7 partition 1, offset 8",
        "partition 1, offset 9",
        "Must have greater than or equal to 90 and less than or equal to 110 rows.",
        "Unclosed group",
        "1000 in all",
        "row counts of 3 previous days are needed, 0 of 7 are known",
    ):
        assert expected in text


class Markup(HTMLParser):
    """The elements of a page with their attributes' names, and what it says outside of scripts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements, self.text, self._in_script = Counter[tuple[str, ...]](), "", False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[(tag, *sorted(name for name, _ in attrs))] += 1
        self._in_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._in_script else data


def evil(plain: bool) -> dict[str, Any]:
    """A verdict with markup wherever a text can be; or with plain text, of as many words, there."""

    def text(number: int) -> str:
        attack = (
            f"<script>alert({number})</script>",
            f"<img src=x onerror=alert({number})>",
            f'"onclick="alert({number})',
            f"'><b id={number}>",
            f"&lt;i&gt;{number}</span></td>",
            "{{ 7 * 7 }} $v__1 ${x}",
            "\\u003cu\\u003e",
        )
        return f"plain {number}" if plain else f"{number} " + " ".join(attack)

    rows = [{"game": text(1)} | at(7), {"game": text(2), "a<b": text(3)} | at(8)]
    values = {
        "element_count": 100, "unexpected_count": 2, "partial_unexpected_list": [text(4), text(5)],
        "partial_unexpected_index_list": rows,
    }  # fmt: skip
    in_set = Expectation(
        "expect_column_values_to_be_in_set", {"column": "game", "value_set": [text(6), text(7)]}
    )
    regex = Expectation("expect_column_values_to_match_regex", {"column": "game", "regex": text(8)})
    listed = Expectation(
        "expect_column_distinct_values_to_be_in_set", {"column": text(9), "value_set": [text(10)]}
    )
    null = Expectation("expect_column_values_to_not_be_null", {"column": text(11)})
    condition = {
        "row_condition": f'col("{text(17)}") < 5',
        "condition_parser": "great_expectations",
        "column": "game",
    }
    some = Expectation("expect_column_values_to_not_be_null", condition)
    without_rows = values | {"partial_unexpected_index_list": []}
    failed = (
        describe_failure(in_set, values, None),
        describe_failure(regex, without_rows, None),
        describe_failure(
            listed,
            {"observed_value": [text(12)], "details": {"value_counts": [{"value": text(13)}]}},
            None,
        ),
        describe_failure(null, {}, text(14)),
        describe_failure(some, without_rows, None),
    )
    quality = QualityResult(
        passed=False,
        failed=tuple(f.as_dict() for f in failed),
        warnings=(),
        evaluated=7,
        suite=text(15),
        met=tuple(map(describe_met, (in_set, regex, listed))),
        not_applicable=({"type": MET[2].type, "reason": text(16)},),
    )
    fields: dict[str, Any] = json.loads(json.dumps(quality.as_dict()))
    return fields


# Great Expectations warns about conditions written as text, which it still reads.
@pytest.mark.filterwarnings(
    "ignore:(The condition_parser parameter|Passing a string to the row_condition)"
)
def test_markup_in_data_is_text_in_every_page(tmp_path: Path) -> None:
    """The same elements with the same attributes as with plain text; and a browser shows what the
    record has."""
    sites = {}
    for name, plain in (("plain", True), ("evil", False)):
        (tmp_path / name).mkdir()
        build(
            "game_events",
            "games.game_events",
            [row("2026-11-21T03", quality=evil(plain))],
            tmp_path / name,
        )
        sites[name] = [Markup(page) for page in sorted((tmp_path / name).rglob("*.html"))]
    assert len(sites["plain"]) == len(sites["evil"]) >= 3
    for plain_page, evil_page in zip(sites["plain"], sites["evil"], strict=True):
        assert evil_page.elements == plain_page.elements
    said = " ".join(page.text for page in sites["evil"])
    # An exception has no numbers.
    for number in (6, 8, "'…'"):
        assert (
            f"{number} <script>alert({number})</script> <img src=x onerror=alert({number})>" in said
        )
    assert "&lt;" not in said.replace("&lt;i&gt;", "")
    assert not [p for p in tmp_path.rglob("*") if not p.resolve().is_relative_to(tmp_path)]


def test_a_verdict_that_cannot_be_rendered_is_no_missing_page(tmp_path: Path) -> None:
    broken = verdict() | {
        "failed": [verdict()["failed"][0] | {"rows": [{"partition": 1, "offset": 2}]}]
    }
    broken["failed"][0]["kwargs"] = {"column": ["no", "name"]}
    with pytest.raises(Terminal, match="expected 1 pages, found that 0 could be rendered"):
        build("game_events", "games.game_events", [row("2026-11-21T03", quality=broken)], tmp_path)


def test_which_decisions_get_a_page() -> None:
    quality = {"passed": True, "evaluated": 1}
    hours = [f"2026-11-{day:02}T{hour:02}" for day in (20, 21, 22) for hour in range(24)]
    history = [row(h, d, quality) for h in hours for d in ("refused", "accepted")]
    history += [
        row(hours[-1], "sealed"),
        row(hours[-1], "served"),
        row("2026-11-23T00", "accepted", quality | {"evaluated": 0}),
    ]
    assert [(r.hour, r.decision) for r in plan_pages(history, None)] == [
        (h, "accepted") for h in hours[-NEWEST:]
    ]
    assert [r.decision for r in plan_pages(history, hours[3])] == ["refused", "accepted"]
    assert plan_pages(history, "2026-11-23T00") == []


@pytest.mark.parametrize("to", ["s3://", "http://host/x", "file:///tmp/x"])
def test_another_place_than_a_folder_or_s3_is_refused(to: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--to: expected a folder or s3://bucket/prefix"):
        publish(new_environment(Path("x")), new_stream(), [], to, AT)


def test_a_list_of_pages_that_cannot_be_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, read = tmp_path / "anabranch-pages.json", Path.read_bytes
    listed.write_text('{"validations/old.html": "2026-11-20T00:00:00+00:00"}')

    def refuse(path: Path) -> bytes:
        if path == listed:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(Terminal, match=r"--to: expected to read .*found .*Permission denied"):
        publish(
            new_environment(tmp_path),
            new_stream(),
            [row("2026-11-21T03", quality=verdict())],
            str(tmp_path),
            AT,
        )
    assert "old.html" in listed.read_text()


def test_pages_go_after_their_age_and_no_file_of_others_does(tmp_path: Path) -> None:
    """The folder may have `#` in its name. A name outside the site that a stranger put into the
    list is ignored."""
    to = tmp_path / "docs#1"
    precious = tmp_path / "validations" / "precious.html"
    foreign = to / "validations" / "notes.html"
    for file in (precious, foreign):
        file.parent.mkdir(parents=True)
        file.write_text("theirs")

    def pages() -> list[str]:
        return sorted(path.stem for path in (to / "validations").rglob("*.html"))

    def docs(hour: str, now: datetime) -> None:
        index = publish(
            new_environment(tmp_path),
            new_stream(),
            [row(hour, quality=verdict())],
            str(to),
            now,
            timedelta(days=30),
        )
        assert index == str(to / "index.html") and hour in (to / "index.html").read_text()

    docs("2026-11-21T03", AT)
    listed = json.loads((to / "anabranch-pages.json").read_text())
    assert [Path(name).stem for name in listed] == ["2026-11-21T03"]
    listed |= {
        "validations/../../validations/precious.html": AT.isoformat(),
        "../x.html": AT.isoformat(),
    }
    (to / "anabranch-pages.json").write_text(json.dumps(listed))
    docs("2026-11-21T04", AT + timedelta(days=30))
    assert pages() == ["2026-11-21T03", "2026-11-21T04", "notes"]
    docs("2026-11-21T05", AT + timedelta(days=30, seconds=1))
    assert pages() == ["2026-11-21T04", "2026-11-21T05", "notes"]
    assert precious.exists() and not list(to.rglob("2026-11-21T03*"))
