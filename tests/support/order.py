"""A pytest plugin: with several processes, the longest files start first, so that all processes end
at about the same time.

For `--dist loadfile --no-loadscope-reorder`: one process runs a file, and creates the fixtures of
its module once.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"
_UNKNOWN_SECONDS = 5.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    known: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        file, _, test = item.nodeid.partition("::")
        seconds[file] += known.get(file, {"": _UNKNOWN_SECONDS}).get(test, 0.0)
    for file in seconds:
        seconds[file] += known.get(file, {"": _UNKNOWN_SECONDS}).get("", 0.0)
    items.sort(
        key=lambda item: (-seconds[item.nodeid.partition("::")[0]], item.nodeid.partition("::")[0])
    )
