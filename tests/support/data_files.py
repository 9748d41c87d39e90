"""The data files that a test reads."""

from typing import Any

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO


def record_data_file_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list, in order, of the data files that PyIceberg opens in this process from now."""
    locations: list[str] = []
    real = PyArrowFileIO.new_input

    def new_input(self: PyArrowFileIO, location: str) -> Any:
        if location.endswith(".parquet"):
            locations.append(location)
        return real(self, location)

    monkeypatch.setattr(PyArrowFileIO, "new_input", new_input)
    return locations
