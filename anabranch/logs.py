"""Logging: one line an event, readable on a terminal, JSON when `ANABRANCH_LOG=json` (deployed)."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Plain(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")


def configure_logging(level: int = logging.INFO, as_json: bool = False) -> None:
    """Log our own events to standard error, and of everybody else only warnings. Safe to call again."""
    handler = logging.StreamHandler(_standard_error())
    handler.setFormatter(_Json() if as_json or os.environ.get("ANABRANCH_LOG") == "json" else _Plain())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # A job that spark-submit runs logs as __main__.
    for name in ("__main__", "anabranch", "speed_layer", "batch_layer", "serving_layer"):
        logging.getLogger(name).setLevel(level)


def _standard_error() -> TextIO:
    """Where to log. spark-submit joins a Python job's standard error to its standard output, meant for results: so our
    command line names its own, where the system can open it."""
    named = os.environ.get("ANABRANCH_STDERR")
    if named is not None:
        with suppress(OSError):
            return Path(named).open("a", encoding="utf-8", buffering=1)
    return sys.stderr
