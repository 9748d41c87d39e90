"""Iceberg and its files: what may write the tables. Knows no hours and no layers beyond the names of branches."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _WithoutPandas(MetaPathFinder):
    """Says that pandas is not installed."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "pandas":
            raise ImportError("pandas is imported when it is needed", name=fullname)


def _import_datasets() -> None:
    """Import PyArrow's datasets without pandas, which they ask for only to know whether it is there.

    It would be a second of each command's start. `to_pandas` imports it when it is called
    (https://github.com/apache/arrow/blob/main/python/pyarrow/pandas-shim.pxi).
    """
    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow.dataset  # noqa: F401
    finally:
        sys.meta_path.remove(finder)


_import_datasets()
