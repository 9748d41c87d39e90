"""Expectations of the quality gate, as a suite's file has them."""

from pathlib import Path
from typing import Any

import yaml


def entry(type: str, **kwargs: Any) -> dict[str, Any]:
    return {"type": type, "kwargs": kwargs}


def suite_of(folder: Path, *entries: dict[str, Any]) -> Path:
    """A file of these entries."""
    path = folder / "some.expectations.yaml"
    path.write_text(yaml.safe_dump({"name": "some", "expectations": list(entries)}))
    return path
