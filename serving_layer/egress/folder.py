"""Folders: an hour as Parquet files, listed by a manifest and `_SUCCESS`.

    ROOT/date=2026-11-20/hour=13/2026-11-20T13-r1-5f0c1e9277ab01cd-00000.parquet
    ROOT/date=2026-11-20/hour=13/_manifest.json
    ROOT/date=2026-11-20/hour=13/_SUCCESS

The steps guarantee, wherever a process ends between them: the manifest lists files that all exist,
of one revision; and while `_SUCCESS` exists, the folder contains exactly the files of the manifest.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator

from anabranch import config
from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.json_values import parse
from anabranch.common.remote_errors import lake_errors
from anabranch.common.temporary import locked
from anabranch.config.sections import Target
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO, store_of
from anabranch.iceberg.files import delete_files, list_files, local_path
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key
from anabranch.job import Job
from anabranch.protocol import deliveries
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.publish import new_id
from serving_layer.egress.hour import Hour, Restored, is_current

_JSON = "application/json"


@dataclass(frozen=True)
class SmallFile:
    """The content of a small file; `tag` distinguishes it from any file that replaces it."""

    body: bytes
    tag: str


@dataclass(frozen=True)
class Storage(ABC):
    """A folder target's operations on storage. Raise Transient, ConfigurationError (rights)."""

    io: LakeFileIO

    @abstractmethod
    def find(self, path: str) -> SmallFile | None:
        """Return a small file, whole; None if it does not exist."""

    @abstractmethod
    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        """Replace `before` by a small file, atomically; False if another file is there."""

    @abstractmethod
    def put(self, path: str, body: bytes) -> None:
        """Write a small file, atomically."""

    def output(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Open a stream to a new file: on S3 it appears complete at close, on this machine as it
        grows. Once closed, it survives a machine failure."""
        stream: Any = self.io.new_output(path).create(overwrite=True)
        return stream  # type: ignore[no-any-return]

    def names(self, folder: str) -> frozenset[str]:
        return frozenset(file.path.rpartition("/")[2] for file in list_files(self.io, folder))

    def delete(self, folder: str, names: frozenset[str]) -> None:
        """Delete files; those that are already gone are ignored."""
        delete_files(self.io, [f"{folder}/{name}" for name in sorted(names)])


@dataclass(frozen=True)
class S3Storage(Storage):
    """Storage on S3, by conditional writes."""

    _store: ObjectStore

    def find(self, path: str) -> SmallFile | None:
        found = self._store.find(*_on_s3(path))
        return SmallFile(*found) if found is not None else None

    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        return self._store.put_if(
            *_on_s3(path), body, _JSON, before.tag if before is not None else None
        )

    def put(self, path: str, body: bytes) -> None:
        self._store.put(*_on_s3(path), body, _JSON)


class LocalStorage(Storage):
    """Storage on this machine, for one process at a time (`opened`)."""

    def find(self, path: str) -> SmallFile | None:
        try:
            body = local_path(path).read_bytes()
        except FileNotFoundError:
            return None
        return SmallFile(body, sha256(body).hexdigest())

    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        if self.find(path) != before:
            return False
        self.put(path, body)
        return True

    def put(self, path: str, body: bytes) -> None:
        target = local_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, whose name no process can guess: else a link of that name, by another user of
        # the folder, would direct the bytes to any file that this process may write.
        written = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        with written.open("xb") as new:
            new.write(body)
        _sync(written)
        written.rename(target)
        _sync(target.parent)

    @contextmanager
    def output(self, path: str) -> Iterator[IO[bytes]]:
        with super().output(path) as stream:
            yield stream
        _sync(local_path(path))


@contextmanager
def open_storage(environment: config.Environment, root: str) -> Iterator[Storage]:
    """Open the storage of a root. A root on this machine is for one process only: raises Transient
    while another has it open."""
    io = LakeFileIO(catalog_properties(environment))
    if bucket_and_key(root) is not None:
        yield S3Storage(io, store_of(io))
        return
    folder = local_path(root)
    with lake_errors(f"open {root}"):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".anabranch.lock", seconds=1):
            yield LocalStorage(io)


def _on_s3(path: str) -> tuple[str, str]:
    found = bucket_and_key(path)
    assert found is not None
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NAME = "_manifest.json"
SUCCESS = "_SUCCESS"
VERSION = 1

_FILE_NAME = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d-r\d+-([0-9a-f]{8})[0-9a-f]{8}-\d{5,}\.parquet", re.ASCII
)


def mark_of(stream: str, root: str, hour: str) -> str:
    """Return the part of a file's name by which egress recognizes the files that it wrote for this
    hour at this place, such as those that a killed process left. Others are not deleted. Pure."""
    return sha256(f"{stream}\n{root}\n{hour}".encode()).hexdigest()[:8]


def is_marked(name: str, mark: str) -> bool:
    return (found := _FILE_NAME.fullmatch(name)) is not None and found[1] == mark


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
    """An hour in a folder. Each writing process sets its own `delivery`; `_SUCCESS` repeats it once
    the folder has exactly these files. Other fields: as `Hour`."""

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


def find_foreign(before: Manifest | None, mark: str, listed: Collection[str]) -> list[str]:
    """Return the files of a folder that egress did not write. Readers skip names that begin with
    `_` or `.`; but `_SUCCESS` without a manifest marks the folder as another program's. Pure."""
    own = before.names if before is not None else frozenset[str]()
    found = {n for n in listed if not (n.startswith(("_", ".")) or n in own or is_marked(n, mark))}
    return sorted(found | ({SUCCESS} & {*listed} if before is None else set()))


class Todo(Enum):
    NOTHING = "it contains the hour"
    FINISH = "the manifest names the hour's files, others may be there too"
    WRITE = "it contains another content, or none"


def is_later(before: Manifest | None, hour: Hour) -> bool:
    """Return whether a folder has another content of the hour, of a later snapshot. Pure."""
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


FILE_ROWS = 1_000_000
"""Maximum number of rows of a file."""


def folder_of(root: str, hour: str) -> str:
    date, _, of_day = hour.partition("T")
    return f"{root}/date={date}/hour={of_day}"


@dataclass(frozen=True)
class Folder:
    job: Job
    target: Target
    storage: Storage

    def last(self) -> Delivery | None:
        """Return the newest delivery. Raises Transient, Terminal without its table."""
        table = self.job.stream.egress_table
        return deliveries.newest(self.job.lake, table, self.target.name, self.target.place)

    def deliver(self, hour: Hour, token: str, all_again: bool) -> Delivery:
        """Write the hour's rows into the hour's folder. Idempotent. Raises Restored, unless
        `all_again` (every hour is being delivered). Raises Transient, also when another process
        delivers the same hour at this moment, and as `plan_folder` does."""
        folder, storage = folder_of(self.target.place, hour.name), self.storage
        path, success = f"{folder}/{NAME}", f"{folder}/{SUCCESS}"
        mark = mark_of(hour.stream, self.target.place, hour.name)
        with lake_errors(f"deliver to {folder}"):
            # Step 1: list the folder.
            seen, marked = storage.find(path), storage.find(success)
            before = Manifest.decode(path, seen.body) if seen is not None else None
            former = before.names if before is not None else frozenset[str]()
            is_ours = is_later(before, hour) and is_current(self.job, hour)
            if is_ours and not all_again:
                raise Restored
            todo = plan_folder(
                path, before, marked.body if marked is not None else None, hour, is_ours
            )
            delivery = new_id()
            if before is not None and todo is Todo.NOTHING:
                return hour.delivered(
                    self.target.name, self.target.place, before.delivery, len(before.files), token
                )
            listed = storage.names(folder)
            # Else a marker that came with it would be another program's.
            if before is None and NAME in listed:
                raise _overtaken(folder)
            _require_own(folder, find_foreign(before, mark, listed))
            # Step 2: after deleting `_SUCCESS`, write files that do not count yet.
            if before is None or todo is Todo.WRITE:
                if marked is not None:
                    # Decision 28: replaced first, since the marker may be by now that of another
                    # process, which has recorded its delivery and would not mark the folder again.
                    if not storage.replace(success, f"{delivery}\n".encode(), marked):
                        raise _overtaken(folder)
                    storage.delete(folder, frozenset({SUCCESS}))
                reach(Step.EGRESS_BEGUN)
                files = self._write(folder, hour, mark + delivery[:8])
            else:
                files = before.files
            reach(Step.EGRESS_WRITTEN)
            # Step 3: list them in the manifest. Files of earlier deliveries are of other revisions
            # and processes.
            after = of_hour(hour, files, delivery)
            # Before the manifest: a process that finds it there may add files that count later.
            there = {name for name in storage.names(folder) if is_marked(name, mark)}
            if not storage.replace(path, after.encode(), seen):
                self._give_up_unless_named(path, after)
            reach(Step.EGRESS_NAMED)
            # Step 4: delete other files by name: those of the previous manifest, and of deliveries
            # that did not replace it.
            storage.delete(folder, frozenset((former | there) - after.names))
            reach(Step.EGRESS_CLEARED)
            # Step 5: mark the folder as complete.
            storage.put(success, f"{delivery}\n".encode())
        return hour.delivered(self.target.name, self.target.place, delivery, len(files), token)

    def _write(self, folder: str, hour: Hour, id: str) -> tuple[ParquetFile, ...]:
        written: list[ParquetFile] = []
        with hour.batches(self.target.name) as batches:
            for i, part in enumerate(_parts(batches, FILE_ROWS)):
                name = f"{hour.name}-r{hour.revision}-{id}-{i:05}.parquet"
                rows, size = self._write_file(f"{folder}/{name}", batches.schema, part)
                written.append(ParquetFile(name, rows, size))
        if (rows := sum(file.rows for file in written)) != hour.rows:
            raise Transient(
                f"deliver to {folder}: expected {hour.rows} rows of hour {hour.name} by its "
                f"manifests, found {rows}; readers see no change, run it again"
            )
        return tuple(written)

    def _write_file(
        self, path: str, schema: pa.Schema, part: Iterator[pa.RecordBatch]
    ) -> tuple[int, int]:
        rows = 0
        with self.storage.output(path) as stream:
            with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
                for batch in part:
                    writer.write_batch(batch)
                    rows += batch.num_rows
            size = stream.tell()
        return rows, size

    def _give_up_unless_named(self, path: str, after: Manifest) -> None:
        """Return if only the answer to the manifest was lost. Else delete the written files that no
        other process's manifest lists, and raise Transient."""
        seen = self.storage.find(path)
        now = Manifest.decode(path, seen.body) if seen is not None else None
        if now == after:
            return
        folder = path.removesuffix(f"/{NAME}")
        mine = {name for name in after.names if f"{after.delivery[:8]}-" in name}
        named = now.names if now is not None else frozenset()
        self.storage.delete(folder, frozenset(mine - named))
        raise _overtaken(folder)


def _overtaken(folder: str) -> Transient:
    return Transient(
        f"deliver to {folder}: expected to be the only process, found that another delivered the "
        "hour meanwhile; run it again"
    )


def _require_own(folder: str, foreign: list[str]) -> None:
    """Raise ConfigurationError for a folder with files that egress did not write."""
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ConfigurationError(
            f"deliver to {folder}: expected only files that egress wrote, found "
            f"{', '.join(foreign[:5])}{more}; nothing was changed there: give the target its own "
            "root, or move these files away"
        )


def _parts(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[Iterator[pa.RecordBatch]]:
    """Yield the batches in parts of `rows` rows; read each part before requesting the next."""
    left: list[pa.RecordBatch] = []

    def part(first: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        wanted, batch = rows, first
        while batch is not None:
            if batch.num_rows > wanted:
                yield batch.slice(0, wanted)
                left.append(batch.slice(wanted))
                return
            yield batch
            wanted -= batch.num_rows
            batch = next(flowing, None) if wanted else None

    flowing = (batch for batch in batches if batch.num_rows)
    while (first := left.pop() if left else next(flowing, None)) is not None:
        yield part(first)


@contextmanager
def open_folder(job: Job, target: Target) -> Iterator[Folder]:
    """Open a folder target. Raises Transient while another process has a local one open."""
    with open_storage(job.environment, target.place) as storage:
        yield Folder(job, target, storage)
