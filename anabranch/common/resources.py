"""Files that we ship beside the code: where a checkout has them, else where the wheel carries
them."""

from __future__ import annotations

from pathlib import Path

from anabranch.common.errors import Terminal

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(in_checkout: str, in_wheel: str) -> Path:
    """A shipped file. Raises Terminal when it is in neither place."""
    places = (_PACKAGE.parent / in_checkout, _PACKAGE / in_wheel)
    for file in places:
        if file.is_file():
            return file
    raise Terminal(
        f"{places[0].name}: expected it in {places[0].parent} or {places[1].parent}, found it in "
        "neither; install the package again"
    )
