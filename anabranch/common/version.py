"""The version of this code, as recorded and reported; and files shipped with it, in a checkout at
one place, in the wheel at another.
"""

from __future__ import annotations

from pathlib import Path

from anabranch.common.errors import Terminal

VERSION = "0.1.0"


_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(in_checkout: str, in_wheel: str) -> Path:
    """Return the path of a shipped file. Raises Terminal if it is in neither place."""
    places = (_PACKAGE.parent / in_checkout, _PACKAGE / in_wheel)
    for file in places:
        if file.is_file():
            return file
    raise Terminal(
        f"{places[0].name}: expected it in {places[0].parent} or {places[1].parent}, found it in "
        "neither; install the package again"
    )
