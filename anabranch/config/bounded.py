"""Folders that other programs only ever add to, and that `anabranch maintain` keeps within bounds."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from anabranch.config.durations import parse_duration

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/[^\s?#*]+")


def _folder(value: str) -> str:
    parts = value.split("/")
    if ".." in parts or not value.strip("/. ") or ("://" in value and not _S3.fullmatch(value)):
        raise ValueError("expected s3://BUCKET/FOLDER, or a folder of this machine, without '..'")
    return value.rstrip("/")


def _a_day_or_more(value: timedelta) -> timedelta:
    if value < timedelta(days=1):
        raise ValueError("expected 1 day or more: what is being written may look as old as its beginning")
    return value


class BoundedFolder(BaseModel):
    """Of a folder, the files whose path within it matches `files` (`*` stands for any text, slashes too) are deleted
    `after` so long, and the oldest once there are more than `most`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Annotated[str, AfterValidator(_folder)]
    files: str = Field(default="*", min_length=1)
    after: Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_a_day_or_more)] = timedelta(days=30)
    most: int = Field(default=100_000, ge=1)

    @property
    def name(self) -> str:
        """The folder, with what of it where that is not all."""
        return self.folder if self.files == "*" else f"{self.folder}/{self.files}"

    @property
    def place(self) -> str:
        """Where it is, as `anabranch.table.files` lists it."""
        return self.folder if self.folder.startswith("s3://") else _local(self.folder)

    def holds(self, path: str) -> bool:
        """Whether a path within the folder is one of its files."""
        return fnmatchcase(path, self.files)


def check_bounded(folders: tuple[BoundedFolder, ...], warehouse: str, catalog: str) -> None:
    """Raise ValueError for a folder that is or holds the warehouse, the catalog's file, the working folder or the
    user's own, or that lies in the warehouse."""
    lake = _local(warehouse.removeprefix("file://")) if warehouse.startswith("file://") else warehouse
    kept = {"the warehouse": lake, "the working folder": _local("."), "the home folder": _local("~")}
    if catalog.startswith("sqlite:///"):
        kept["the catalog"] = _local(catalog.removeprefix("sqlite:///"))
    for folder in folders:
        for what, place in kept.items():
            if _is_within(place, folder.place) or (place == lake and _is_within(folder.place, lake)):
                raise ValueError(f"bounded: expected a folder apart from {what}, {place}, found {folder.folder!r}")


def _local(folder: str) -> str:
    path = Path(folder)
    # Nobody's home is known in a container under a number of its own.
    with suppress(RuntimeError):
        path = path.expanduser()
    return f"file://{path.resolve()}"


def _is_within(place: str, other: str) -> bool:
    """Whether a place is another one, or lies in it."""
    return f"{place.rstrip('/')}/".startswith(f"{other.rstrip('/')}/")
