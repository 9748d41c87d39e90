"""Anabranch: Kafka to one exact Iceberg table through two arms.

`anabranch.open("game_events")` reads a stream's table from Python (`serving_layer.reader.handle.open_table`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

__version__ = "0.1.0"


class _PandasLater(MetaPathFinder):
    """Says that pandas is not installed for as long as PyArrow's datasets are being imported.

    They ask for it only to know whether it is there, which would be a second of each command's start. `to_pandas`
    imports it when it is called (https://github.com/apache/arrow/blob/main/python/pyarrow/pandas-shim.pxi).
    """

    def find_spec(self, fullname: str, *_: Any) -> None:
        datasets = sys.modules.get("pyarrow.dataset")
        if fullname == "pandas" and datasets is not None and not hasattr(datasets, "write_dataset"):
            raise ImportError("pandas is imported when it is needed", name=fullname)


sys.meta_path.insert(0, _PandasLater())


def __getattr__(name: str) -> Any:
    """What notebooks use, imported when it is asked for: the rooms below import nothing of the serving layer."""
    if name == "open":
        return import_module("serving_layer.reader.handle").open_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
