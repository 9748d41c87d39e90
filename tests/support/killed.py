"""A function of a test in a separate process, with an armed fail point."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from anabranch.common import fail_points
from anabranch.common.fail_points import FAIL_AT

_PRELOADED = [
    "anabranch.cli", "anabranch.operations.audit", "anabranch.lifecycle.maintenance",
    "batch_layer.plan", "click.testing", "hypothesis.strategies", "psutil", "pyarrow.acero",
    "pyiceberg.catalog.sql", "pytest", "serving_layer.egress", "serving_layer.views",
    "sqlalchemy.connectors", "unittest.mock",
]  # fmt: skip


def run_armed(at: str, function: Callable[..., Any], *arguments: Any) -> int | None:
    """Call a module's function in another process with a fail point armed; its exit code."""
    context = multiprocessing.get_context("forkserver")
    # The fork server imports the dependencies of test modules once. It cannot find the test modules
    # themselves.
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_call, args=(at, function, arguments))
    process.start()
    process.join(60)
    return process.exitcode


def kill_at(at: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a module's function in a separate process, and assert that the fail point killed it."""
    code = run_armed(at, function, *arguments)
    assert code == -signal.SIGKILL, f"expected it to be killed at {at}, found {code}"


def _call(at: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ[FAIL_AT] = at
    fail_points._armed.cache_clear()
    function(*arguments)
