"""The command `anabranch`: where its process begins. Imports nothing that an installation may
lack."""

from __future__ import annotations

import sys
import traceback


def main() -> None:
    """Run the command. What cannot be imported ends it with exit code 70: Python's own would be 1,
    *refused*."""
    try:
        from anabranch import cli
    except ImportError:
        traceback.print_exc()
        sys.exit(70)
    cli.run()
