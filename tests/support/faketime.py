"""Another clock for one process: Debian's libfaketime."""

from pathlib import Path

import programs


def ensure() -> Path:
    """Return the library; root installs it with apt-get if it is missing."""
    if not (paths := _find()):
        programs.install("faketime")
        paths = _find()
    assert paths, "expected libfaketime.so.1, found none: install it (apt-get install faketime)"
    return paths[0]


def _find() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def clock(library: Path, offset: str) -> dict[str, str]:
    """Return the environment of a process whose clock is off by `offset`, such as `+10m`."""
    settings = {"DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_RESET": "1"}
    return {"LD_PRELOAD": str(library), "FAKETIME": offset, **settings}
