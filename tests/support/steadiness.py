"""A pytest plugin: no test waits for the clock, and a hang leaves the stacks and the services'
logs.

Tests on the real services count hours, and an hour that ends meanwhile may fail one: such a test is
run once more. They are those that ask for `environment`, themselves or by another fixture, or for
`steady_hour`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from pytest_timeout import _get_item_settings

_LINES = 40
# How long after its time-out a test may still run, which pytest-timeout could not end: one that
# waits in native code.
_GRACE_SECONDS = 60.0


def shared_folder(config: Any) -> Path:
    """The temporary folder of the whole test run, which all its processes share."""
    own = Path(config._tmp_path_factory.getbasetemp())
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def this_hour() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not {"environment", "steady_hour"} & set(getattr(item, "fixturenames", ())):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    began = this_hour()
    # After the last test pytest ends the fixtures of the session, unless something of it is still
    # to come.
    reports = runtestprotocol(item, nextitem=nextitem or item.session, log=False)  # type: ignore[arg-type]
    if any(report.failed for report in reports) and this_hour() != began:
        print(
            f"{item.nodeid}: failed, and the hour {began} ended meanwhile: run once more",
            file=sys.stderr,
        )
        print(
            "\n".join(report.longreprtext for report in reports if report.failed), file=sys.stderr
        )
        # Module fixtures may hold the hour that has ended; those of the session hold none.
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that its time-out does not end ends the process, and leaves the stacks of its threads
    in a file."""
    seconds = _get_item_settings(item).timeout
    if not seconds:
        return (yield)
    # Standard error is captured, and lost with the process.
    with (shared_folder(item.config) / f"stacks-{os.getpid()}.log").open("w") as stacks:
        faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True, file=stacks)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class Controller:
    """What the process does that only hands out the tests."""

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A process that ended before its time: its stacks, and what the services that it used
        logged last."""
        if error:
            base = shared_folder(node.config)
            for log in sorted([*base.glob("stacks-*.log"), *base.glob("services/logs/*.log")]):
                print(f"end of {log}:\n{tail(log)}", file=sys.stderr)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Controller(), "steadiness-controller")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that took too long: beside the stacks, the ends of the logs of the services and of its
    jobs."""
    report: Any = yield
    if report.failed and "pytest-timeout" in str(report.longrepr):
        report.sections += [(f"end of {log}", tail(log)) for log in logs(item)]
    return report


def logs(item: pytest.Item) -> list[Path]:
    """The logs of the services that the run shares, and of the test's own folder."""
    shared = shared_folder(item.config)
    own = getattr(item, "funcargs", {}).get("tmp_path")
    return [
        *sorted(shared.glob("services/logs/*.log")),
        *(sorted(own.rglob("*.log")) if own else ()),
    ]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:])
