"""Print what `anabranch init` wrote."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from anabranch.cli.render import print_result


def print_written(folder: str, written: Sequence[Path], output: str) -> None:
    """Print the files of a starter folder, and what to do next."""
    there = "" if Path(folder).resolve() == Path.cwd() else f"cd {shlex.quote(folder)}, "
    stream, environment = (Path(folder) / "conf" / name for name in ("streams/game_events.yaml", "anabranch.yaml"))
    lines = [
        *(f"wrote {file}" for file in written),
        f"edit: {stream} is one topic, its table and schema: copy it for a topic of your own",
        f"edit: {environment} has the addresses of Kafka, S3 and the catalog",
        f"next: {there}anabranch dev up, anabranch apply (README.md has every step)",
    ]
    print_result({"folder": folder, "files": [str(file) for file in written]}, lines, output)
