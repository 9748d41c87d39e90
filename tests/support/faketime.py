"""Another clock for one process: Debian's libfaketime."""

import os
import shutil
import subprocess
from pathlib import Path


def ensure() -> Path:
    """Return the library; root installs it with apt-get if it is missing."""
    if not (paths := _find()) and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "faketime"],
            check=True,
            capture_output=True,
            timeout=300,
        )
        paths = _find()
    assert paths, (
        "expected libfaketime.so.1, found none: install the package faketime (apt-get install "
        "faketime)"
    )
    return paths[0]


def _find() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def clock(library: Path, offset: str) -> dict[str, str]:
    """Return the environment of a process whose clock is off by `offset`, such as `+10m`."""
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": offset,
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }
