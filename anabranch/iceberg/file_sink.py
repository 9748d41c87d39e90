"""The log of Spark's file sink, `_spark_metadata`: it lists the valid files of a folder.

A micro-batch is valid if its log file is complete: `N`, or `N.compact`, which has the entries of
all earlier micro-batches too. Files of killed micro-batches are in the folder but in no log file.
Spark's reader follows the same rules (org.apache.spark.sql.execution.streaming.FileStreamSinkLog).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote

from anabranch.common.errors import Refused
from anabranch.common.json_values import parse

FOLDER = "_spark_metadata"
_BATCH = re.compile(r"(\d+)(\.compact)?")
_DATA_FILE = re.compile(r"part-\d{5}-[0-9a-f-]{36}[-.]c\d{3}\..*")


@dataclass(frozen=True)
class Entry:
    """A file in the log: its path as Spark wrote it, URL-decoded, and its size in bytes."""

    path: str
    size: int
    is_deleted: bool = False


@dataclass(frozen=True)
class _Line:
    """The JSON of a file in the log."""

    path: str
    size: int
    action: str = "add"


@dataclass(frozen=True)
class SinkLog:
    """The valid files, in the order of their micro-batches. `through`: the last valid micro-batch;
    `cut_short`: the last log file if it is incomplete, so that its micro-batch is not valid."""

    entries: tuple[Entry, ...]
    through: int
    cut_short: str | None = None


def is_written_by_spark(name: str) -> bool:
    """Return whether a file has a name as Spark's writers give it."""
    return _DATA_FILE.fullmatch(name.rpartition("/")[2]) is not None


def read_log(names: Iterable[str], read: Callable[[str], str], where: str) -> SinkLog:
    """Read the log of a sink from the files `names` of its folder. Ignores files of killed writers,
    such as `.12.….tmp`.

    Raises Refused, with the name of the log file, if one before the last is missing or damaged.
    """
    # If a number has both files, the compact one is used: its name sorts after the other's.
    log = {
        int(found[1]): name
        for name in sorted(names)
        if (found := _BATCH.fullmatch(name)) is not None
    }
    if not log:
        return SinkLog((), -1)

    @cache
    def entries_of(number: int) -> list[Entry] | None:
        return _parse_entries(read(log[number]))

    last, cut_short = max(log), None
    if entries_of(last) is None:
        cut_short, last = log.pop(last), last - 1
    begin = max((number for number, name in log.items() if name.endswith(".compact")), default=0)
    entries: list[Entry] = []
    for number in range(begin, last + 1):
        if number not in log:
            raise Refused(
                f"{where}: expected log files {begin} to {last}, found no {number}; restore it, "
                f"or move {FOLDER} away to import every file of the folder, where rows that "
                "repeat by the stream's key are left out"
            )
        of_batch = entries_of(number)
        if of_batch is None:
            raise Refused(
                f"{where}/{log[number]}: expected a line v1 and lines of JSON, found other lines; "
                f"restore it, or move {FOLDER} away to import every file of the folder"
            )
        entries += of_batch
    deleted = {one.path for one in entries if one.is_deleted}
    kept = [one for one in entries if one.path not in deleted]
    return SinkLog(tuple(dict.fromkeys(kept)), last, cut_short)


def _parse_entries(text: str) -> list[Entry] | None:
    """Return the entries of a log file; None if it is incomplete."""
    version, *lines = text.split("\n")
    if version != "v1":
        return None
    try:
        values = [parse(_Line, line) for line in lines if line]
        return [Entry(unquote(v.path), v.size, v.action == "delete") for v in values]
    except ValueError:
        return None


def match(log: SinkLog, sizes: dict[str, int], root: str, where: str) -> list[str]:
    """Return the names, within the folder `root`, of the valid files. `sizes` has the sizes of all
    its files by name. A copied folder has other paths than the log: its files are found by the ends
    of their paths.

    Raises Refused for a file that is missing or has another size.
    """
    by_last = dict[str, list[str]]()
    for known in sizes:
        by_last.setdefault(known.rpartition("/")[2], []).append(known)
    found = []
    name: str | None
    for entry in log.entries:
        path = (
            entry.path.partition(":")[2].lstrip("/")
            if ":" in entry.path
            else entry.path.lstrip("/")
        )
        candidates = by_last.get(path.rpartition("/")[2], ())
        own = path.removeprefix(root)
        name = (
            own if own in sizes else next((c for c in candidates if path.endswith(f"/{c}")), None)
        )
        if name is None or sizes[name] != entry.size:
            there = "none" if name is None else f"one of {sizes[name]} bytes"
            raise Refused(
                f"{where}: expected the file {entry.path} of {entry.size} bytes, which the log "
                f"lists, found {there}; restore it: its rows would be missing"
            )
        found.append(name)
    return found
