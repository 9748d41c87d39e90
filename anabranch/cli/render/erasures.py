"""Print erasures: what one removes or would remove, what is left of it, and where a scan found its values."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.common.output import print_json
from anabranch.operations.erasure.run import Erased, Found
from anabranch.operations.erasure.scan import Scan
from anabranch.operations.erasure.status import ErasureStatus, status_lines, view


def print_found(stream: str, found: Found, output: str) -> None:
    if output == "json":
        print_json({"stream": stream, "dry_run": True, "found": found})
        return
    print(
        f"{stream}: would erase {found.rows} rows and {found.dead} dead letters of {len(found.hours)} hours, and "
        f"replace {found.files} files"
    )


def print_erased(stream: str, done: Erased, output: str) -> None:
    removed = done.removed
    if output == "json":
        print_json({"stream": stream, "erasure": done.erasure.as_dict(), "removed": removed, "left": done.left})
        return
    print(
        f"{stream}: erasure {done.erasure.id}: removed {removed.rows} rows and {removed.dead} dead letters of "
        f"{len(removed.hours)} hours"
    )
    print(f"{stream}: {done.left or f'done on every branch; `anabranch erase {stream} --status` shows the rest'}")
    if done.was_done:
        print(f"{stream}: it is of records before {done.erasure.at:%F %T} UTC; --again erases those since")


def print_scan(stream: str, done: Scan, values: int, output: str) -> None:
    """`values`: how many were looked for."""
    if output == "json":
        print_json({"stream": stream, **vars(done)})
        return
    for hit in done.hits:
        print(f"{stream}: {hit.where}: {hit.path}{f' version {hit.version}' if hit.version else ''}")
    found = f"{len(done.hits)} places with one" if done.hits else "none"
    print(
        f"{stream}: read {done.objects} objects and {done.versions} versions, {done.bytes} bytes: found {found} of "
        f"{values} values"
    )


def print_erasures(stream: str, statuses: Sequence[ErasureStatus], output: str) -> None:
    if output == "json":
        print_json({"stream": stream, "erasures": view(statuses)})
        return
    for line in [line for one in statuses for line in status_lines(one)] or ["no erasure"]:
        print(f"{stream}: {line}")
