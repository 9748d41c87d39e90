"""Logging: one line an event, readable on a terminal, JSON when `ANABRANCH_LOG=json` (deployed).

In JSON an event has fields beside its message, from the enclosing `fields` blocks and `note` calls.
These belong to the thread; `stream` and `layer` belong to the process.

| field | |
|---|---|
| `stream`, `layer` | the stream and layer of the process |
| `hour` | the ingest hour that is rebuilt |
| `offsets` | a micro-batch's offsets, `{partition: [first, end]}`, `end` excluded |
| `attempt` | the id of the staged rows: of their snapshot (`wap.id`); for an hour also of its
  publish and its ledger row |
| `publish` | the id of the newest requested publish (`anabranch.publish` in the snapshots'
  summaries) |
| `snapshots` | the snapshots of the newest publish that landed, by branch |
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from anabranch.common.errors import redact

_PROCESS_FIELDS: dict[str, Any] = {}
_THREAD_FIELDS: ContextVar[dict[str, Any] | None] = ContextVar(
    "anabranch.common.logs", default=None
)


def of_process(**values: Any) -> None:
    """Add these fields to every event of this process, in all threads."""
    _PROCESS_FIELDS.update(values)


def fields_now() -> Mapping[str, Any]:
    """Return the fields of an event logged now by this thread."""
    return _PROCESS_FIELDS | (_THREAD_FIELDS.get() or {})


@contextmanager
def fields(**values: Any) -> Iterator[None]:
    """Add these fields to every event that this thread logs inside the block."""
    token = _THREAD_FIELDS.set((_THREAD_FIELDS.get() or {}) | values)
    try:
        yield
    finally:
        _THREAD_FIELDS.reset(token)


def note(**values: Any) -> None:
    """Add fields to later events of the enclosing `fields` block; do nothing outside of one."""
    if (around := _THREAD_FIELDS.get()) is not None:
        around.update(values)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        line |= {key: value for key, value in fields_now().items() if key not in line}
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


class _Plain(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def configure_logging(as_json: bool = False) -> None:
    """Log our own events to standard error, and only warnings of other libraries. Idempotent."""
    handler = logging.StreamHandler(_standard_error())
    handler.setFormatter(
        _Json() if as_json or os.environ.get("ANABRANCH_LOG") == "json" else _Plain()
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # A job that spark-submit runs logs as __main__.
    for name in ("__main__", "anabranch", "speed_layer", "batch_layer", "serving_layer"):
        logging.getLogger(name).setLevel(logging.INFO)


def _standard_error() -> TextIO:
    """Return the stream to log to. spark-submit joins a Python job's standard error to its standard
    output, which is for results: so our command line names its own, used if it can be opened."""
    named = os.environ.get("ANABRANCH_STDERR")
    if named is not None:
        with suppress(OSError):
            return Path(named).open("a", encoding="utf-8", buffering=1)
    return sys.stderr
