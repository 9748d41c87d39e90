"""A pytest plugin: no test waits for the clock, and a hang leaves the stacks and the services' logs.

Tests on the real services count hours, and an hour that ends meanwhile may fail one: such a test is run once more. They
are those that ask for `environment`, themselves or by another fixture, or for `steady_hour`.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

_LINES = 40


def this_hour() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not {"environment", "steady_hour"} & set(getattr(item, "fixturenames", ())):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    began = this_hour()
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports) and this_hour() != began:
        print(f"{item.nodeid}: failed, and the hour {began} ended meanwhile: run once more", file=sys.stderr)
        # Module fixtures may hold the hour that has ended; those of the session hold none.
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that took too long: all threads' stacks, and the ends of the logs of the services and of its jobs."""
    report: Any = yield
    if report.failed and "pytest-timeout" in str(report.longrepr):
        report.sections.append(("stacks", stacks()))
        report.sections += [(f"end of {log}", tail(log)) for log in logs(item)]
    return report


def stacks() -> str:
    """What every thread of this process is at; the one that failed has its traceback in the report."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def logs(item: pytest.Item) -> list[Path]:
    """The logs of the services that the run shares, and of the test's own folder."""
    base = Path(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    own = getattr(item, "funcargs", {}).get("tmp_path")
    return [*sorted(shared.glob("services/logs/*.log")), *(sorted(own.rglob("*.log")) if own else ())]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:])
