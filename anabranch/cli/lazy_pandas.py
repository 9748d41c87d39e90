"""Keep PyArrow from importing pandas at the start of a command."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _LazyPandas(MetaPathFinder):
    """Import hook that hides pandas from `pyarrow.dataset`, whose import only checks whether pandas
    is installed.

    This saves each command a second. `to_pandas` imports pandas when it is called
    (https://github.com/apache/arrow/blob/main/python/pyarrow/pandas-shim.pxi).
    """

    def find_spec(self, fullname: str, *_: Any) -> None:
        datasets = sys.modules.get("pyarrow.dataset")
        if fullname == "pandas" and datasets is not None and not hasattr(datasets, "write_dataset"):
            raise ImportError("pandas is imported on first use", name=fullname)


def install() -> None:
    """Install the import hook in this process. Call it only in Anabranch's own processes, never in
    a program that imports Anabranch."""
    sys.meta_path.insert(0, _LazyPandas())
