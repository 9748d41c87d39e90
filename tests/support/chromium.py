"""Chromium for the tests of the status page: the installed one, else Debian's package."""

import os
import shutil
import subprocess

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def ensure() -> str:
    """Return the executable. Raises RuntimeError if it is missing and cannot be installed."""
    if (found := _found()) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (
            ["update", "-qq"],
            ["install", "-y", "-qq", "--no-install-recommends", "chromium"],
        ):
            subprocess.run(
                ["apt-get", *arguments], check=True, env=environment, capture_output=True,
                timeout=900,
            )  # fmt: skip
        found = _found()
    if found is None:
        raise RuntimeError(
            "expected Chromium on the PATH, found none; install it (Debian: apt-get install "
            "chromium)"
        )
    return found


def _found() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)
