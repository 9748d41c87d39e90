"""Anabranch: Kafka to one exact Iceberg table through two arms.

`anabranch.open("game_events")` reads a stream's table from Python
(`serving_layer.reader.open_table`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from anabranch.common.version import VERSION as __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    """Import `open` on first use: the packages below import nothing of the serving layer."""
    if name == "open":
        return import_module("serving_layer.reader").open_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
