"""The lakes of unit tests that ask for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lakes import StreamLake


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    from lakes import new_lake

    return new_lake(tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    from proofs import new_proof

    return new_proof(tmp_path)
