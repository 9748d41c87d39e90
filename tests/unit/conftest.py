"""The lakes of unit tests that ask for nothing else, and the reports that are compared whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

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


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], None]]:
    """Require that a report is, whole, what the YAML file beside the test's module has for it.

    A test may have several. After an intended change, run it with `ANABRANCH_WRITE_VIEWS=1`.
    """
    file, name = request.path.with_suffix(".yaml"), request.node.name
    known = yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}
    is_writing, shown = "ANABRANCH_WRITE_VIEWS" in os.environ, list[Any]()

    def compare(report: Any) -> None:
        shown.append(report)
        assert is_writing or report == known[name][len(shown) - 1]

    yield compare
    if is_writing:
        file.write_text(
            yaml.safe_dump(known | {name: shown}, width=116, allow_unicode=True), "utf-8"
        )
    else:
        assert len(shown) == len(known[name]), "each recorded report is compared"
