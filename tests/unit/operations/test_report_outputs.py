"""Output of the views, byte for byte: scripts read the JSON, and its keys are a contract.

`report_outputs.txt` contains the output. After an intended change, run this file with
`ANABRANCH_WRITE_VIEWS=1`.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import time_machine
from pages import browser, new_page, stand_still
from proofs import HOUR, NEXT, job, new_proof
from report_hours import LATER, a_full_hour, an_old_hour, kafka, nothing_yet

from anabranch.cli import report, reports
from anabranch.cli.render.hours import audit_text, explanation_text, history_text, hours_text
from anabranch.cli.render.rows import difference_text, duplicates_text, letters_text
from anabranch.common.output import plain, print_json
from anabranch.job import Job
from anabranch.operations.audit import audit
from anabranch.operations.reports import dead_letters, explain, status
from anabranch.protocol.decisions import decisions
from anabranch.protocol.state import load_state

GOLDEN = Path(__file__).with_name("report_outputs.txt")


@pytest.fixture(autouse=True)
def still() -> Iterator[None]:
    """A constant time for every caller, PyIceberg included, which writes it into the table."""
    with time_machine.travel(LATER, tick=False):
        yield


def views(job: Job) -> Iterator[tuple[str, Any, Callable[[Any], report.Text]]]:
    """Every view, and its text."""
    yield "hours", status.hours(job), hours_text
    yield "status", status.status(job, timedelta(seconds=1)), reports.status_text
    for hour in (None, NEXT):
        found = decisions(job.lake, job.stream, hour)
        yield f"history {hour}", found, partial(history_text, "events", hour)
    for hour in ("2026-11-20T23", HOUR, NEXT, "2026-11-21T02", "2026-11-21T09"):
        facts = explain.explain(job, hour, LATER)
        sentences = explain.explain_sentences(facts)
        view = plain(facts) | {"sentences": [f"{subject}: {text}" for subject, text in sentences]}
        yield f"explain {hour}", view, lambda _, s=sentences: explanation_text(s)
    for hours in (None, (HOUR, HOUR)):
        yield f"dead letters {hours}", dead_letters.letters(job, hours, 3), letters_text
    yield "audit", audit(job, None, with_kafka=False), audit_text
    accepted = load_state(job.lake, job.stream.table).is_accepted
    for hour in filter(accepted, (HOUR, NEXT)):
        difference, duplicates = dead_letters.compare(job, hour, 2, 9)
        yield f"diff {hour}", difference, difference_text
        yield f"duplicates {hour}", duplicates, duplicates_text


def metrics_text(job: Job) -> str:
    page = new_page(job)
    page.readers[job.stream.name].refresh()
    return browser(page).get("/metrics").text


def test_reports_print_what_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for made in (a_full_hour, an_old_hour, nothing_yet):
        one = new_proof(tmp_path / made.__name__)
        made(one)
        stand_still(one.lake)
        of = replace(job(one), kafka=kafka())
        for name, view, text_of in views(of):
            capsys.readouterr()
            print_json(view)
            shown.append(f"==== {made.__name__}: {name}, json\n{capsys.readouterr().out}")
            report.print_text(text_of(view))
            shown.append(f"==== {made.__name__}: {name}, text\n{capsys.readouterr().out}")
        shown.append(f"==== {made.__name__}: metrics\n{metrics_text(of)}")
    text = re.sub(r'"code_version": ".*?"', '"code_version": "<version>"', "".join(shown))
    text = re.sub(
        r'("name": ".*",\s+)"user": ".*",\s+"host": ".*",\s+"at": ".*"',
        r'\1"user and host and at": "<of this run>"',
        text,
    )
    text = re.sub(r"(_metadata_bytes\{.*\}) .*", r"\1 <bytes>", text)
    if os.environ.get("ANABRANCH_WRITE_VIEWS"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
