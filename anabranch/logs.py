"""Logging: one line an event, readable on a terminal, JSON when `ANABRANCH_LOG=json` (deployed)."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime


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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json or os.environ.get("ANABRANCH_LOG") == "json" else _Plain())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("anabranch", "speed_layer", "batch_layer", "serving_layer"):
        logging.getLogger(name).setLevel(level)
