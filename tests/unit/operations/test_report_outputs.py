"""Output of the views, byte for byte: scripts read the JSON, and its keys are a contract.

`report_outputs.txt` contains the output. After an intended change, run this file with
`ANABRANCH_WRITE_VIEWS=1`.
"""

from __future__ import annotations

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
from pages import browser, new_page
from proofs import HOUR, NEXT, job, new_proof
from report_hours import LATER, a_full_hour, an_old_hour, kafka, nothing_yet

from anabranch.cli.render.audit import print_audit
from anabranch.cli.render.dead_letters import print_letters
from anabranch.cli.render.difference import print_difference, print_duplicates
from anabranch.cli.render.explanation import print_explanation
from anabranch.cli.render.history import print_history
from anabranch.cli.render.status import print_hours, print_status
from anabranch.job import Job
from anabranch.operations.audit import audit
from anabranch.operations.reports import dead_letters, diff, explain, status
from anabranch.protocol.decisions import decisions
from anabranch.protocol.state import load_state

GOLDEN = Path(__file__).with_name("report_outputs.txt")


@pytest.fixture(autouse=True)
def still() -> Iterator[None]:
    """A constant time for every caller, PyIceberg included, which writes it into the table."""
    with time_machine.travel(LATER, tick=False):
        yield


def printed(job: Job) -> Iterator[tuple[str, Any, Callable[[Any, str], None]]]:
    """Every view, and what prints it."""
    yield "hours", status.hours(job), print_hours
    yield "status", status.status(job, timedelta(seconds=1)), print_status
    for hour in (None, NEXT):
        yield (
            f"history {hour}",
            decisions(job.lake, job.stream, hour),
            partial(print_history, "events", hour),
        )
    for hour in ("2026-11-20T23", HOUR, NEXT, "2026-11-21T02", "2026-11-21T09"):
        yield f"explain {hour}", explain.explain(job, hour, LATER), print_explanation
    for hours in (None, (HOUR, HOUR)):
        yield f"dead letters {hours}", dead_letters.letters(job, hours, 3), print_letters
    yield "audit", audit(job, None, with_kafka=False), print_audit
    accepted = load_state(job.lake, job.stream.table).is_accepted
    for hour in filter(accepted, (HOUR, NEXT)):
        yield f"diff {hour}", diff.difference(job, hour, 2), print_difference
        yield f"duplicates {hour}", diff.duplicates(job, hour, 9), print_duplicates


def metrics_text(job: Job) -> str:
    page = new_page(job)
    page.readers[job.stream.name].refresh()
    return browser(page).get("/metrics").text


def test_the_reports_print_the_recorded_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for made in (a_full_hour, an_old_hour, nothing_yet):
        one = new_proof(tmp_path / made.__name__)
        made(one)
        of = replace(job(one), kafka=kafka())
        for name, view, show in printed(of):
            for output in ("json", "text"):
                capsys.readouterr()
                show(view, output)
                shown.append(f"==== {made.__name__}: {name}, {output}\n{capsys.readouterr().out}")
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
