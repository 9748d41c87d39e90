"""A pytest plugin: it repeats tests that failed because an hour ended, and after a hang reports the
stacks and the services' logs.

A test on the real services counts hours, and may fail if an hour ends during it: it then runs once
more. These tests use the fixture `environment`, directly or through another, or `steady_hour`.
"""

import faulthandler
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from pytest_timeout import _get_item_settings

_LINES = 40
# A test that waits in native code, so that pytest-timeout cannot end it, is ended this long after
# its time-out.
_GRACE_SECONDS = 60.0


def shared_folder(config: Any) -> Path:
    """Return the temporary folder of the test run, which all its processes share."""
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
    # With a next item, pytest does not end the session's fixtures after the last test.
    reports = runtestprotocol(item, nextitem=nextitem or item.session, log=False)  # type: ignore[arg-type]
    if any(report.failed for report in reports) and this_hour() != began:
        said = f"{item.nodeid}: failed, and the hour {began} ended meanwhile: run once more"
        errors = (report.longreprtext for report in reports if report.failed)
        print("\n".join([said, *errors]), file=sys.stderr)
        # Fixtures of modules may have the ended hour; those of the session have none.
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End the process if a time-out does not end the test, and write its stacks to a file."""
    seconds = _get_item_settings(item).timeout
    if not seconds:
        return (yield)
    stacks = _stacks(shared_folder(item.config))
    faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True, file=stacks)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@cache
def _stacks(folder: Path) -> int:
    """Open the file for this process's stacks: captured output is lost with the process."""
    return os.open(folder / f"stacks-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


class Controller:
    """Hooks of the process that distributes the tests."""

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Print the stacks of a process that ended unexpectedly, and ends of services' logs."""
        if error:
            base = shared_folder(node.config)
            for log in sorted([*base.glob("stacks-*.log"), *base.glob("services/logs/*.log")]):
                print(f"end of {log}:\n{tail(log)}", file=sys.stderr)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Controller(), "steadiness-controller")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the ends of the logs of the services and jobs to the report of a test that timed out."""
    report: Any = yield
    if report.failed and "pytest-timeout" in str(report.longrepr):
        report.sections += [(f"end of {log}", tail(log)) for log in logs(item)]
    return report


def logs(item: pytest.Item) -> list[Path]:
    """Return the logs of the run's services and those in the test's own folder."""
    shared = shared_folder(item.config)
    own = getattr(item, "funcargs", {}).get("tmp_path")
    mine = own.rglob("*.log") if own else ()
    return [*sorted(shared.glob("services/logs/*.log")), *sorted(mine)]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:])
