"""The Python packages that executors need in the driver's versions, and the archive that contains
them. `anabranch pack` writes it (`speed_layer.pack`)."""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

ARCHIVE = "anabranch"
"""The archive's folder on executors."""
VERSIONS = "versions.json"
"""The archive's first file: the versions of its contents."""
CODE = ("anabranch", "speed_layer")
"""Our packages that Python workers import."""

_PACKAGES = ("duckdb", "msgspec", "numpy", "protobuf", "pyarrow", "pyiceberg")


@cache
def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages, and a digest of our code: many builds of
    it have the same version."""
    versions = {name: version(name) for name in _PACKAGES}
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **versions,
        "anabranch": _code_digest(),
    }


def _code_digest() -> str:
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in CODE:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Return a sentence for the first part of `expected` that `found` lacks or has in another
    version; None if there is none. Pure."""
    for part, wanted in expected.items():
        if found.get(part) != wanted:
            return f"expected {part} {wanted}, found {found.get(part, 'none')}"
    return None


def packed_archive(conf: Mapping[str, str]) -> Path | None:
    """Return our archive of `spark.archives`; None unless it is a file of this machine."""
    for entry in conf.get("spark.archives", "").split(","):
        place, _, folder = entry.strip().partition("#")
        file = Path(place.removeprefix("file://"))
        if folder == ARCHIVE and file.is_file():
            return file
    return None


def packed_versions(file: Path) -> dict[str, str]:
    """Return the versions in an archive; empty for another program's archive. Raises OSError and
    tarfile.TarError."""
    with tarfile.open(file) as archive:
        first = archive.next()
        content = (
            archive.extractfile(first) if first is not None and first.name == VERSIONS else None
        )
        return dict(json.load(content)) if content is not None else {}
