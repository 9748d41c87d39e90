"""The manifest of an hour's folder, which lists its current files, and the work left for an hour.
Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated

from pydantic import AfterValidator

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.common.json_values import parse
from serving_layer.egress.hour import Hour

NAME = "_manifest.json"
SUCCESS = "_SUCCESS"
BEGUN = "_begun-"
VERSION = 1

_FILE_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-r\d+-[0-9a-f]{8}-\d{5,}\.parquet", re.ASCII)


def file_name(hour: Hour, delivery: str, number: int) -> str:
    return f"{hour.name}-r{hour.revision}-{delivery[:8]}-{number:05}.parquet"


def _own_name(name: str) -> str:
    # Egress deletes files by names that it reads from the folder, where others may write too. A
    # name with `/` would name files of other folders, such as those of the warehouse.
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"expected a name that egress gives a file, found {name[:80]!r}")
    return name


FileName = Annotated[str, AfterValidator(_own_name)]


@dataclass(frozen=True)
class ParquetFile:
    name: FileName
    rows: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """An hour in a folder. Each process that writes the folder sets its own `delivery`; `_SUCCESS`
    repeats it once the folder contains exactly these files. The other fields are those of
    `Hour`."""

    stream: str
    hour: str
    revision: int
    served: str
    snapshot: int
    sequence: int
    source: str
    rows: int
    files: tuple[ParquetFile, ...]
    delivery: str
    version: int = VERSION

    @property
    def names(self) -> frozenset[str]:
        return frozenset(file.name for file in self.files)

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @staticmethod
    def decode(path: str, text: bytes) -> Manifest:
        """Return the manifest. Raises ConfigurationError for text that `encode` did not write."""
        try:
            found = parse(Manifest, text)
            if found.version != VERSION:
                raise ValueError(f"version {found.version}")
            return found
        except ValueError as error:
            raise ConfigurationError(
                f"{path}: expected a manifest of version {VERSION}, found {str(error)[:300]}; if "
                "that folder is not needed, remove it"
            ) from error


def of_hour(hour: Hour, files: tuple[ParquetFile, ...], delivery: str) -> Manifest:
    return Manifest(
        stream=hour.stream,
        hour=hour.name,
        revision=hour.revision,
        served=hour.served,
        snapshot=hour.snapshot_id,
        sequence=hour.sequence,
        source=hour.source,
        rows=hour.rows,
        files=files,
        delivery=delivery,
    )


@dataclass(frozen=True)
class Begun:
    """The names of the files that a delivery writes and of those that it replaces. Egress stores
    them in a small file before it writes the first one, so it recognizes the files that a killed
    process left and deletes no others."""

    stream: str
    files: tuple[FileName, ...]
    replaces: tuple[FileName, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self.files, *self.replaces))

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @staticmethod
    def decode(text: bytes) -> Begun | None:
        """Return the names; None for text that `encode` did not write: another program's file."""
        try:
            return parse(Begun, text)
        except ValueError:
            return None


def begun_name(delivery: str) -> str:
    """Return the name of the file that lists the names that a delivery is about to write. Readers
    skip it."""
    return f"{BEGUN}{delivery[:8]}.json"


def find_foreign(
    before: Manifest | None, begun: Iterable[Begun], listed: Iterable[str]
) -> list[str]:
    """Return the files of a folder that egress did not write. Readers skip names that begin with
    `_` or `.`; but `_SUCCESS` without a manifest marks the folder as another program's. Pure."""
    own = {name for one in begun for name in one.names} | (
        before.names if before is not None else set()
    )
    is_hidden = {name: name.startswith(("_", ".")) for name in listed}
    found = {name for name, hidden in is_hidden.items() if not hidden and name not in own}
    return sorted(found | ({SUCCESS} & is_hidden.keys() if before is None else set()))


class Todo(Enum):
    NOTHING = "it contains the hour"
    FINISH = "the manifest names the hour's files, others may be there too"
    WRITE = "it contains another content, or none"


def is_later(before: Manifest | None, hour: Hour) -> bool:
    """Return whether a folder contains another content of the hour, read at a later snapshot.
    Pure."""
    return before is not None and before.source != hour.source and before.sequence > hour.sequence


def plan_folder(
    path: str, before: Manifest | None, success: bytes | None, hour: Hour, is_current: bool = False
) -> Todo:
    """Return the work left for a folder. Raises ConfigurationError for a folder of another stream.
    Raises Refused if the folder contains the hour as of a later snapshot, unless `is_current`: the
    table serves this content now, so it was restored to an earlier time."""
    if before is None:
        return Todo.WRITE
    if before.stream != hour.stream:
        raise ConfigurationError(
            f"{path}: expected hours of stream {hour.stream}, found some of {before.stream}; give "
            "each stream a root"
        )
    if before.source == hour.source:
        done = success is not None and success.decode(errors="replace").strip() == before.delivery
        return Todo.NOTHING if done else Todo.FINISH
    if is_later(before, hour) and not is_current:
        raise Refused(
            f"{path}: expected the hour as delivered before snapshot {hour.snapshot_id} (sequence "
            f"{hour.sequence}), found a later reading (sequence {before.sequence}): another "
            "process delivers to this place; run it again. If there is none, the stream's tables "
            "were recreated: name another root"
        )
    return Todo.WRITE
