"""The version of this code, as recorded and reported."""

from __future__ import annotations

VERSION = "0.1.0"
