"""Which data files a test has read."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO


def reads_of_data_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files that this process opens by PyIceberg from now on, in their order; the test may
    clear the list."""
    locations: list[str] = []
    real = PyArrowFileIO.new_input

    def new_input(self: PyArrowFileIO, location: str) -> Any:
        if location.endswith(".parquet"):
            locations.append(location)
        return real(self, location)

    monkeypatch.setattr(PyArrowFileIO, "new_input", new_input)
    return locations
