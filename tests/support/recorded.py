"""A pytest plugin that records the cost of each test: `pytest --record FILE`.

The file has the outcome, and the seconds and CPU seconds of setup, call and teardown, of each test;
the outcome is `unfinished` if the run ended before the test's teardown. CPU seconds count
the test's process and all its children, without the services that the whole run shares; they depend
less on the machine's load than seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

_WRITE_AFTER_SECONDS = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", metavar="FILE", help="write the seconds and CPU seconds of each test into FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file:
        config.pluginmanager.register(Recorder(Path(file)), "recorder")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children.

    psutil reads every process of the machine to find children, which takes longer than most tests.
    """
    me = psutil.Process()
    total = 0.0
    for process in (me, *(me.children(recursive=True) if _has_children() else ())):
        with suppress(psutil.Error):
            if process is not me and any(
                "-Danabranch.dev=" in argument for argument in process.cmdline()
            ):
                continue
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _has_children() -> bool:
    """Return whether there may be children. macOS has `waitid` since Python 3.13."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
    return True


class Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.tests: dict[str, dict[str, Any]] = {}
        self._cpu = 0.0
        self._written = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._cpu = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = cpu_seconds()
        report.user_properties = [*report.user_properties, ("cpu", round(now - self._cpu, 2))]
        self._cpu = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            return
        test = self.tests.setdefault(
            report.nodeid, {"outcome": "unfinished", "seconds": {}, "cpu": {}}
        )
        test["seconds"][report.when] = round(report.duration, 2)
        test["cpu"][report.when] = dict(report.user_properties).get("cpu", 0.0)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        elif report.when == "teardown" and test["outcome"] == "unfinished":
            test["outcome"] = "passed"
        if report.when == "teardown" and time.monotonic() - self._written > _WRITE_AFTER_SECONDS:
            self._write()

    def pytest_sessionfinish(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        part = self.file.with_name(f".{self.file.name}.part")
        part.write_text(json.dumps(self.tests, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(self.file)
