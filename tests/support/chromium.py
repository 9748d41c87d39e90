"""Chromium for the tests of the status page: the installed one, else Debian's package."""

import shutil

import programs

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def ensure() -> str:
    """Return the executable. Raises RuntimeError if it is missing and cannot be installed."""
    if (found := _found()) is None:
        programs.install("chromium")
        found = _found()
    if found is None:
        raise RuntimeError("expected Chromium on the PATH, found none (apt-get install chromium)")
    return found


def _found() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)
