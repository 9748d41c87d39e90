"""The entry point of the command `anabranch`. Imports only the standard library at module level."""

from __future__ import annotations

import sys
import traceback


def main() -> None:
    """Run the command. A failed import has exit code 70: Python's own code 1 means *refused*."""
    try:
        from anabranch import cli
    except ImportError:
        traceback.print_exc()
        sys.exit(70)
    cli.run()
