"""The version of this code, in what it records and reports."""

from __future__ import annotations

VERSION = "0.1.0"
