"""Programs that run to their end, and Debian's packages of some of them."""

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def output_of(*command: object, expect: int = 0, seconds: float = 300, **how: Any) -> str:
    """Run a program, or one text with `shell=True`; return its standard output. `how`: as for
    `subprocess.run`. Raises AssertionError with all output after another exit code."""
    words = command[0] if how.get("shell") else [str(word) for word in command]
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": seconds, **how}
    done = subprocess.run(words, **how)  # type: ignore[call-overload]
    found = f"{command}: expected exit code {expect}, found {done.returncode}"
    assert done.returncode == expect, f"{found}:\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def install(*packages: str) -> None:
    """Install Debian's packages; nothing happens on a machine where this process cannot."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        apt = partial(output_of, "apt-get", env=quiet, seconds=900)
        apt("update", "-qq")
        apt("install", "-y", "-qq", "--no-install-recommends", *packages)
