"""Logging: our own events from INFO on, of everybody else only warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from anabranch.logs import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.mark.parametrize(("name", "heard"), [("__main__", True), ("speed_layer.job", True), ("kafka.net", False)])
def test_a_job_is_heard_as_the_module_that_spark_submit_runs_too(name: str, heard: bool) -> None:
    configure_logging()
    assert logging.getLogger(name).isEnabledFor(logging.INFO) is heard
